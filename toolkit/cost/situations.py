"""When CDP helps, and what it costs: memory, devices and step times beside those of DP.

Stages are equal, a backward takes twice its forward, and updates take no time. C is the time of a
training step of computation; M that in which all parameters cross a link once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from toolkit.cost.affordable_delay import affordable_schedule, fastest, step_seconds
from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError, whole
from toolkit.schedule import FRESHEST, catalog
from toolkit.schedule.steady_state import footprint

WITHIN = 0.1
"""Share of a step that the fresher weights of the affordable delay may cost."""
_BACKWARD = 2.0  # by a forward
_STAGES = 8  # or a few more: as many for each worker
_LOCAL = 100.0  # bandwidth within a machine by that between machines: NVLink and 25 Gbit/s


@dataclass(frozen=True)
class Situation:
    """Workers, and the links between them."""

    name: str
    workers: int
    ratio: float = 0.0  # M/C; 0: messages take no time
    placement: str = "per_microbatch"
    machines: int | None = None  # of equal numbers of workers, a group each; None: one a worker


def situations(
    workers: Sequence[int] = (2, 4, 8), ratios: Sequence[float] = (0.5, 1.0, 2.0)
) -> list[Situation]:
    """Return the situations of a table: those without slow links, then slow links.

    Args:
        workers: numbers of workers; without slow links, only the largest.
        ratios: M/C of the slow links.

    Raises:
        UserError: a number is below 2, a ratio is not positive, or there is none.
    """
    if not workers or not ratios or not all(ratio > 0 for ratio in ratios):
        raise UserError(
            f"a table takes numbers of workers, and ratios above 0: got {[*workers]}, {[*ratios]}"
        )
    sizes = [whole(n, "the number of workers", 2) for n in workers]
    n = max(sizes)
    found = [
        Situation("one device", n, placement="one"),
        Situation("model parallelism", n, placement="per_stage_and_microbatch"),
        Situation("a device a worker, fast links", n),
        *(Situation("a device a worker, slow links", n, r) for n in sizes for r in ratios),
    ]
    for together in (2, 4):
        if n % together == 0 and n > together:
            name = f"machines of {together}, slow links"
            found += [Situation(name, n, ratio, machines=n // together) for ratio in ratios]
    return found


def assess(situation: Situation) -> dict[str, Any]:
    """Count and simulate DP and CDP in a situation.

    Returns:
        ``situation``, ``workers``, ``ratio``; ``devices`` and ``activations`` of the fullest one,
        where 1 is what one micro-batch keeps over the whole model, each also with ``_dp``; the
        ``time`` of a step by that of DP, and the mean ``staleness`` in steps, of ``cdp_v1``,
        ``cdp_v2`` and ``affordable``. Within :data:`WITHIN` more than CDP-v1's time, no single
        weight of ``affordable`` could be fresher. Each has the chains that are faster.
    """
    n, alone = situation.workers, situation.placement != "per_microbatch"
    s = n if alone else n * -(-_STAGES // n)
    costs, hardware = unit_costs(s, backward=_BACKWARD), _hardware(situation)
    dp = catalog.data_parallel(n, situation.placement, n_stages=s)
    make = partial(
        catalog.cyclic, n, placement=situation.placement, n_stages=s, groups=situation.machines
    )
    v1, v2 = (fastest(make, delay, costs, hardware) for delay in (1, FRESHEST))
    affordable = affordable_schedule(make, costs, hardware, within=WITHIN)
    of_dp = step_seconds(dp, costs, hardware)
    counted, counted_dp = footprint(v2), footprint(dp)
    row = {
        "situation": situation.name,
        "workers": n,
        "ratio": situation.ratio,
        "devices_dp": counted_dp.ranks,
        "devices": counted.ranks,
        "activations_dp": float(counted_dp.activations),
        "activations": float(counted.activations),
    }
    for name, schedule in (("cdp_v1", v1), ("cdp_v2", v2), ("affordable", affordable)):
        row[f"{name}_time"] = step_seconds(schedule, costs, hardware) / of_dp
        row[f"{name}_staleness"] = schedule.mean_staleness
    return row


def _hardware(situation: Situation) -> Hardware:
    """Machines on whose links all of the stages' bytes take ``ratio`` of a step's computation."""
    if not situation.ratio:
        return UNIT
    bandwidth = 1 / ((1 + _BACKWARD) * situation.ratio)
    links = replace(UNIT, link_bandwidth=bandwidth, shared_ports=True)
    if situation.machines is None:
        return links
    per = situation.workers // situation.machines
    return replace(links, ranks_per_machine=per, local_bandwidth=_LOCAL * bandwidth)

"""When CDP helps, and what it costs: memory, devices and step times compared with DP.

C is the time of a training step of computation; M that in which all parameters cross a link once.
Of a :class:`Situation` the stages are equal, a backward takes twice its forward, and updates take
no time. :func:`assess_model` takes the costs of a model and a machine instead.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

from toolkit.cost.affordable_delay import affordable_schedule, fastest, step_seconds
from toolkit.cost.hardware import UNIT, Hardware
from toolkit.cost.stage_costs import unit_costs
from toolkit.cost.worker_forms import (
    LEAST_STAGES,
    CostsOf,
    DataParallelJob,
    fastest_cdp,
)
from toolkit.errors import UserError, whole
from toolkit.format import digits
from toolkit.schedule import FRESHEST, catalog
from toolkit.schedule.steady_state import footprint

WITHIN = 0.1
"""Share of a step that the fresher weights of the affordable delay may cost."""
_BACKWARD = 2.0  # by a forward
# Bandwidth within a machine by that between machines: NVLink and 25 Gbit/s.
_LOCAL = 100.0


@dataclass(frozen=True)
class Situation:
    """Workers, and the links between them.

    Attributes:
        name: in the table.
        workers: micro-batches of a training step.
        ratio: M/C; 0: messages take no time.
        placement: as in :func:`toolkit.schedule.catalog.cyclic`.
        machines: of equal numbers of workers, a group each; None: one a worker.
    """

    name: str
    workers: int
    ratio: float = 0.0
    placement: str = "per_microbatch"
    machines: int | None = None


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
    sizes = [whole(n_workers, "the number of workers", 2) for n_workers in workers]
    max_workers = max(sizes)
    table_situations = [
        Situation("one device", max_workers, placement="one"),
        Situation(
            "model parallelism", max_workers, placement="per_stage_and_microbatch"
        ),
        Situation("one device per worker, fast links", max_workers),
    ]
    for n_workers, ratio in product(sizes, ratios):
        table_situations.append(
            Situation("one device per worker, slow links", n_workers, ratio)
        )
    for workers_per_machine in (2, 4):
        if max_workers % workers_per_machine == 0 and max_workers > workers_per_machine:
            name = f"machines of {workers_per_machine}, slow links"
            table_situations += [
                Situation(
                    name,
                    max_workers,
                    ratio,
                    machines=max_workers // workers_per_machine,
                )
                for ratio in ratios
            ]
    return table_situations


def assess_situation(situation: Situation) -> dict[str, Any]:
    """Count and simulate DP and CDP in a situation.

    Returns:
        ``situation``, ``workers``, ``ratio``; ``devices`` and ``activations`` of the fullest one,
        where 1 is what one micro-batch keeps over the whole model, each also with ``_dp``; the
        ``time`` of a step by that of DP, and the mean ``staleness`` in steps, of ``cdp_v1``,
        ``cdp_v2`` and ``affordable``. Within :data:`WITHIN` more than CDP-v1's time, no single
        weight of ``affordable`` could be fresher. Each has the chains that are faster.
    """
    n_workers = situation.workers
    n_stages = n_workers
    # As many stages for each worker, LEAST_STAGES or more.
    if situation.placement == "per_microbatch":
        n_stages = n_workers * -(-LEAST_STAGES // n_workers)
    costs = unit_costs(n_stages, backward=_BACKWARD)
    hardware = _hardware(situation)
    dp_schedule = catalog.data_parallel(
        n_workers, situation.placement, n_stages=n_stages
    )
    make = partial(
        catalog.cyclic,
        n_workers,
        placement=situation.placement,
        n_stages=n_stages,
        groups=situation.machines,
    )
    # Chains may differ between the rules: each is compared in its best form.
    schedule_v1 = fastest(make, 1, costs, hardware)
    schedule_v2 = fastest(make, FRESHEST, costs, hardware)
    schedule_affordable = affordable_schedule(make, costs, hardware, within=WITHIN)
    dp_seconds = step_seconds(dp_schedule, costs, hardware)
    footprint_v2 = footprint(schedule_v2)
    footprint_dp = footprint(dp_schedule)
    row = {
        "situation": situation.name,
        "workers": n_workers,
        "ratio": situation.ratio,
        "devices_dp": footprint_dp.ranks,
        "devices": footprint_v2.ranks,
        "activations_dp": float(footprint_dp.activations),
        "activations": float(footprint_v2.activations),
    }
    for name, schedule in (
        ("cdp_v1", schedule_v1),
        ("cdp_v2", schedule_v2),
        ("affordable", schedule_affordable),
    ):
        row[f"{name}_time"] = step_seconds(schedule, costs, hardware) / dp_seconds
        row[f"{name}_staleness"] = schedule.mean_staleness
    return row


def assess_model(costs_of: CostsOf, hardware: Hardware, workers: int) -> dict[str, Any]:
    """Simulate a model with a worker per rank: DistributedDataParallel, CDP-v1 and CDP-v2.

    Args:
        costs_of: costs of the model's stages on a micro-batch.
        hardware: the machines.
        workers: ranks; as many stages, or a few more if there are few.

    Returns:
        ``machine``, ``workers``; ``ratio``, M/C; ``ddp`` in seconds; the ``time`` of a step by that
        of DDP, the mean ``staleness`` in steps and the ``form`` of ``cdp_v1`` and ``cdp_v2``.
    """
    job = DataParallelJob(costs_of, hardware, workers)
    ddp_seconds = job.form().seconds
    row: dict[str, Any] = {
        "machine": hardware.name,
        "workers": workers,
        "ratio": job.link_ratio,
        "ddp": ddp_seconds,
    }
    for name, delay in (("cdp_v1", 1), ("cdp_v2", FRESHEST)):
        form = fastest_cdp(costs_of, hardware, workers, delay)
        row[f"{name}_time"] = form.seconds / ddp_seconds
        row[f"{name}_staleness"] = form.schedule.mean_staleness
        row[f"{name}_form"] = form.words
    return row


def model_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of :func:`assess_model` as the cells of a printed table, by heading."""
    return {
        "model": f"{row['model']}, {row['batch']} {row['samples']}",
        "machine": row["machine"],
        "M/C": f"{row['ratio']:.2g}",
        "DDP, ms": digits(row["ddp"] * 1e3),
        "CDP-v1": f"{row['cdp_v1_time']:.2f}",
        "CDP-v2": f"{row['cdp_v2_time']:.2f}",
    }


def _hardware(situation: Situation) -> Hardware:
    """Return machines on whose links all stages' bytes take ``ratio`` of a step's computation."""
    if not situation.ratio:
        return UNIT
    # A stage has one byte and takes 1 + _BACKWARD seconds, so that M/C of a stage is that of the
    # model.
    bandwidth = 1 / ((1 + _BACKWARD) * situation.ratio)
    links = replace(UNIT, link_bandwidth=bandwidth, shared_ports=True)
    if situation.machines is None:
        return links
    workers_per_machine = situation.workers // situation.machines
    return replace(
        links, ranks_per_machine=workers_per_machine, local_bandwidth=_LOCAL * bandwidth
    )


def situation_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of :func:`assess_situation` as the cells of a printed table, by heading.

    Times are divided by that of DP; in brackets is the mean staleness.
    """
    cells = {
        "situation": row["situation"],
        "workers": row["workers"],
        "M/C": f"{row['ratio']:g}",
    }
    for name in ("devices", "activations"):
        dp_text = f"{row[f'{name}_dp']:.4g}"
        cdp_text = f"{row[name]:.4g}"
        cells[name] = dp_text
        if dp_text != cdp_text:
            cells[name] = f"{dp_text} → {cdp_text}"
    for name, label in (
        ("cdp_v1", "CDP-v1"),
        ("cdp_v2", "CDP-v2"),
        ("affordable", "affordable"),
    ):
        cells[label] = f"{row[f'{name}_time']:.2f} ({row[f'{name}_staleness']:.2f})"
    return cells

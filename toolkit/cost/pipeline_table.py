"""Compare the catalogue's pipelines on equal ranks and equal stages.

A backward takes twice its forward, each half of it as long as the forward; messages and updates
take no time.
"""

from typing import Any

from toolkit.cost.hardware import UNIT
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError, whole
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.steady_state import footprint, steps_to_time

METHODS: dict[str, catalog.Method] = {
    method.label: method
    for kind in ("pipeline", "cyclic")
    for method in catalog.METHODS.values()
    if method.kind == kind and "state" not in method.options
}
"""The methods of the table: every pipeline, and CDP with a rank for each stage."""


def pipelines(n_ranks: int, n_microbatches: int) -> tuple[dict[str, Schedule], dict[str, str]]:
    """Return the catalogue's pipelines by name, and the reason each other one is left out.

    Args:
        n_ranks: ranks p; methods use p stages, or 2p where a rank has two.
        n_microbatches: per training step.

    Raises:
        UserError: a number is not an integer, or below 1.
    """
    p = whole(n_ranks, "the number of ranks", 1)
    m = whole(n_microbatches, "the number of micro-batches", 1)
    made: dict[str, Schedule] = {}
    left_out: dict[str, str] = {}
    for label, method in METHODS.items():
        try:
            if method.kind == "pipeline":
                ranks = {"n_ranks": p} if "n_ranks" in method.options else {}
                made[label] = method(p * method.stages_per_rank, m, **ranks)
            elif m % p:
                left_out[label] = f"CDP takes as many micro-batches a rank: got {m} for {p} ranks"
            else:
                made[label] = method(p, placement="per_stage", accumulate=m // p)
        except UserError as error:
            left_out[label] = str(error)
    return made, left_out


def assess(method: str, schedule: Schedule) -> dict[str, Any]:
    """Count and simulate a schedule of :func:`pipelines` in its steady state.

    Returns:
        ``method``, ``microbatches`` of a training step and ``ranks``; ``activations``, the peak of
        one rank, and ``total_activations`` of all together, where 1 is what one micro-batch keeps
        over the whole model; ``idle``, the share of the ranks' time without compute; ``weights``,
        the peak of one rank over all versions, in models (updates hold a stage twice);
        ``staleness_mean`` and ``staleness_max`` in steps; ``flush``, whether all weights are fresh.
    """
    counted = footprint(schedule)
    program = schedule.lower(steps_to_time(schedule)).verify()
    return {
        "method": method,
        "microbatches": schedule.n_microbatches,
        "ranks": counted.ranks,
        "activations": counted.activations,
        "total_activations": counted.total_activations,
        "idle": simulate(program, unit_costs(schedule.n_stages, backward=2.0), UNIT).idle_share,
        "weights": counted.weights,
        "staleness_mean": schedule.mean_staleness,
        "staleness_max": schedule.max_staleness,
        "flush": schedule.max_staleness == 0,
    }

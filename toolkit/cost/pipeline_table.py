"""Compare the catalogue's pipelines on equal ranks and equal stages.

A backward takes twice its forward, each half of it as long as the forward; messages and updates
take no time.
"""

from dataclasses import dataclass
from fractions import Fraction

from toolkit.cost.hardware import UNIT
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError, whole
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.steady_state import footprint, steps_to_time


@dataclass(frozen=True)
class Pipeline:
    """Steady-state cost of a pipeline method.

    Attributes:
        method: name, independent of the sizes.
        microbatches: per training step.
        ranks: devices.
        activations: peak of one rank; 1 is what one micro-batch keeps over the whole model.
        total_activations: peak of all ranks together, in the same unit.
        idle: share of the ranks' time without compute.
        weights: peak of one rank over all versions, in models; updates hold a stage twice.
        staleness_mean: mean steps of delay over stages and micro-batches.
        staleness_max: largest delay.
    """

    method: str
    microbatches: int
    ranks: int
    activations: Fraction
    total_activations: Fraction
    idle: float
    weights: Fraction
    staleness_mean: float
    staleness_max: int

    @property
    def flush(self) -> bool:
        """Whether each step ends before the next begins, so that all weights are fresh."""
        return self.staleness_max == 0


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


def assess(method: str, schedule: Schedule) -> Pipeline:
    """Count and simulate a schedule of :func:`pipelines`."""
    counted = footprint(schedule)
    program = schedule.lower(steps_to_time(schedule)).verify()
    timeline = simulate(program, unit_costs(schedule.n_stages, backward=2.0), UNIT)
    return Pipeline(
        method=method,
        microbatches=schedule.n_microbatches,
        ranks=counted.ranks,
        activations=counted.activations,
        total_activations=counted.total_activations,
        idle=timeline.idle_share,
        weights=counted.weights,
        staleness_mean=schedule.mean_staleness,
        staleness_max=schedule.max_staleness,
    )


METHODS: dict[str, catalog.Method] = {
    method.label: method
    for kind in ("pipeline", "cyclic")
    for method in catalog.METHODS.values()
    if method.kind == kind and "state" not in method.options
}
"""The methods of the table: every pipeline, and CDP with a rank for each stage."""

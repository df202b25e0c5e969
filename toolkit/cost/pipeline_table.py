"""The catalogue's pipelines side by side: the same ranks, an equal share of one model each.

A backward takes twice as long as its forward, its halves as long as that each, and messages and
updates take no time: what is left is the schedule's own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from toolkit.cost.hardware import UNIT
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import unit_costs
from toolkit.errors import UserError, whole
from toolkit.schedule import FRESHEST, Schedule, catalog
from toolkit.schedule.footprint import footprint
from toolkit.schedule.staleness import Delay
from toolkit.schedule.steady import steps_to_time

Make = Callable[[int, int], Schedule]


@dataclass(frozen=True)
class Pipeline:
    """What a method asks of its ranks, in the steady state.

    Attributes:
        method: its name, whatever the sizes.
        microbatches: of a training step.
        ranks: devices.
        activations: the most that one rank holds, in micro-batches: 1 is all that one keeps over
            the whole model.
        total_activations: the most that all ranks hold together, likewise.
        idle: the share of the ranks' time in which they do not compute.
        weights: the most that one rank holds at once, all versions, in models; an update writes a
            stage's new version beside the old, for that moment.
        staleness_mean: steps by which weights are late, over stages and micro-batches.
        staleness_max: the largest.
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
    """Every pipeline of the catalogue on ``n_ranks``, by name; and why others are left out.

    Args:
        n_ranks: ranks, p: with p stages, or with two a rank where the method has them.
        n_microbatches: of a training step.

    Raises:
        ValueError: a number that is not whole, or below 1.
    """
    p = whole(n_ranks, "the number of ranks", 1)
    m = whole(n_microbatches, "the number of micro-batches", 1)
    made: dict[str, Schedule] = {}
    left_out: dict[str, str] = {}
    for method, make in METHODS.items():
        try:
            made[method] = make(p, m)
        except ValueError as error:
            left_out[method] = str(error)
    return made, left_out


def assess(method: str, schedule: Schedule) -> Pipeline:
    """Count and simulate one of :func:`pipelines`."""
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


def _two_stages_a_rank(make: Make) -> Make:
    return lambda p, m: make(2 * p, m)


def _cyclic(delay: Delay) -> Make:
    def make(p: int, m: int) -> Schedule:
        if m % p:
            raise UserError(
                f"CDP's workers run the same number of micro-batches: {m} cannot be dealt out to"
                f" {p}; make them a multiple of the ranks"
            )
        return catalog.cyclic(p, delay, "per_stage", accumulate=m // p)

    return make


METHODS: dict[str, Make] = {
    "GPipe": catalog.gpipe,
    "1F1B": catalog.one_f_one_b,
    "interleaved 1F1B": lambda p, m: catalog.interleaved_1f1b(2 * p, m, p),
    "ZB-H1": catalog.zero_bubble,
    "ZB-V": _two_stages_a_rank(catalog.zb_v),
    "V-Half": _two_stages_a_rank(catalog.v_half),
    "V-Min": _two_stages_a_rank(catalog.v_min),
    "PipeDream-2BW": catalog.pipedream_2bw,
    "CDP-v1": _cyclic(1),
    "CDP-v2": _cyclic(FRESHEST),
}
"""How each method is made for p ranks and m micro-batches."""

"""When the workers of one device start, for the least activations at once.

All workers run the same ops over a period of 2S slots: stage j's forward in slot j of a worker, its
backward in slot 2S-1-j, as in :mod:`toolkit.schedule.timing`. Only their starts are free. Workers
are alike, so that the number that start in each slot decides: a small integer program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.errors import UserError, whole
from toolkit.schedule import FRESHEST, Kind, Op, Schedule, Timing
from toolkit.schedule.staleness import Delay


@dataclass(frozen=True)
class Staggered:
    """Starts of workers, and what they hold.

    Attributes:
        schedule: on one device, one micro-batch a worker.
        offsets: ``[worker]``, slots, ascending.
        peak: the most that all workers hold at once, in the unit of ``held``.
        bound: the least peak of any offsets; equal to ``peak``, unless time ran out.
    """

    schedule: Schedule = field(repr=False)
    offsets: tuple[int, ...]
    peak: float
    bound: float


def best_offsets(
    held: Sequence[float], n_workers: int, *, delay: Delay = FRESHEST, seconds: float = 60.0
) -> Staggered:
    """Find offsets of workers that minimise the peak of their summed activations.

    Args:
        held: ``[stage]``, what one micro-batch keeps from a stage's forward to its backward.
        n_workers: workers, with a micro-batch each.
        delay: as in :class:`Schedule`; the offsets have to allow it.
        seconds: limit of the solver.

    Raises:
        UserError: sizes are out of range, or the offsets do not allow the delay.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    n_stages, workers_in_all = len(held), whole(n_workers, "the number of workers", 1)
    if not n_stages or not all(activation >= 0 for activation in held):
        raise UserError(f"held is 0 or more, of each stage: got {[*held]}")
    period = 2 * n_stages
    held_by_slot = np.zeros(period)  # of a worker that starts in slot 0
    for stage, activation in enumerate(held):
        held_by_slot[stage : period - stage] += activation
    # Variables: workers that start in each slot, and the peak. One starts in slot 0.
    held_by_start = np.stack([np.roll(held_by_slot, slot) for slot in range(period)], axis=1)
    rows = [
        LinearConstraint(np.hstack([held_by_start, -np.ones((period, 1))]), ub=np.zeros(period)),
        LinearConstraint(
            np.hstack([np.ones((1, period)), [[0.0]]]), workers_in_all, workers_in_all
        ),
    ]
    lower_bounds = np.zeros(period + 1)
    lower_bounds[0] = 1
    solution = milp(
        np.eye(period + 1)[period],
        integrality=np.append(np.ones(period), 0),
        bounds=Bounds(lower_bounds, np.append(np.full(period, workers_in_all), np.inf)),
        constraints=rows,
        options={"time_limit": seconds},
    )
    if solution.x is None:
        raise UserError(
            f"no offsets of {workers_in_all} workers within {seconds:g} s: give more seconds"
        )
    starting = np.rint(solution.x[:period]).astype(int)
    offsets = tuple(np.repeat(np.arange(period), starting).tolist())
    starts = {
        Op(kind, stage, worker): offset + (stage if kind == Kind.FORWARD else period - 1 - stage)
        for worker, offset in enumerate(offsets)
        for stage in range(n_stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    schedule = Schedule(
        "searched offsets", n_stages, workers_in_all, Timing(starts, period), "one", delay
    )
    return Staggered(
        schedule, offsets, float((held_by_start @ starting).max()), float(solution.mip_dual_bound)
    )

"""When the workers of one device start, for the least activations at once.

All workers run the same ops over a period of 2S slots: stage j's forward in slot j of a worker, its
backward in slot 2S-1-j, as in :mod:`toolkit.schedule.timing`. Only their starts are free. Workers
are alike, so that the number that start in each slot decides: a small integer program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UserError, whole
from toolkit.plan.shifts import shifted_levels
from toolkit.schedule import FRESHEST, Kind, Op, Schedule, Timing
from toolkit.schedule.staleness import Delay


@dataclass(frozen=True)
class Staggered:
    """Starts of workers, and what they hold.

    Attributes:
        schedule: on one device, one micro-batch per worker.
        offsets: ``[worker]``, slots, ascending.
        peak: the most that all workers keep at once, in the unit of ``activations``.
        bound: the lowest peak of any offsets; equal to ``peak``, unless time ran out.
    """

    schedule: Schedule = field(repr=False)
    offsets: tuple[int, ...]
    peak: float
    bound: float


def best_offsets(
    activations: Sequence[float],
    n_workers: int,
    *,
    delay: Delay = FRESHEST,
    seconds: float = 60.0,
) -> Staggered:
    """Find offsets of workers that minimise the peak of their summed activations.

    Args:
        activations: ``[stage]``, what one micro-batch keeps from a stage's forward to its backward.
        n_workers: workers, with a micro-batch each.
        delay: as in :class:`Schedule`; the offsets have to allow it.
        seconds: limit of the solver.

    Raises:
        UserError: sizes are out of range, or the offsets do not allow the delay.
    """
    n_stages = len(activations)
    n_workers = whole(n_workers, "the number of workers", 1)
    if not n_stages or not all(activation >= 0 for activation in activations):
        raise UserError(
            f"activations are 0 or more, of each stage: got {[*activations]}"
        )
    period = 2 * n_stages
    activations_by_slot = np.zeros(period)  # of a worker that starts in slot 0
    for stage, activation in enumerate(activations):
        activations_by_slot[stage : period - stage] += activation
    # Each column is a worker that starts in a slot, wrapped around the period. Of two stages that
    # keep 1 each, as rows:
    #
    #     slot     0 1 2 3
    #     start 0  1 2 2 1
    #     start 1  1 1 2 2
    levels = shifted_levels(activations_by_slot, np.arange(period))
    workers_of_slot, bound = _best_starts(levels, n_workers, seconds)

    offsets = tuple(np.repeat(np.arange(period), workers_of_slot).tolist())
    starts = {}
    for worker, offset in enumerate(offsets):
        for stage in range(n_stages):
            starts[Op(Kind.FORWARD, stage, worker)] = offset + stage
            starts[Op(Kind.BACKWARD, stage, worker)] = offset + period - 1 - stage
    timing = Timing(starts, period)
    schedule = Schedule("searched offsets", n_stages, n_workers, timing, "one", delay)
    return Staggered(
        schedule, offsets, peak=float((levels @ workers_of_slot).max()), bound=bound
    )


def _best_starts(
    levels: NDArray[np.float64], n_workers: int, seconds: float
) -> tuple[NDArray[np.int64], float]:
    """Return the number of workers that start in each slot, and a bound on the peak.

    Args:
        levels: ``[slot, start]``, what a worker keeps in a slot.
        n_workers: workers in all.
        seconds: limit of the solver.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    # Variables: workers that start in each slot, and the peak. One starts in slot 0.
    period = len(levels)
    below_peak = np.hstack([levels, -np.ones((period, 1))])
    all_workers = np.append(np.ones(period), 0.0)
    peak = np.eye(period + 1)[period]
    # Shifting all workers alike changes no sum, so one of them may as well start in slot 0. The
    # solver then meets no shifted copies of a solution.
    lower_bounds = np.zeros(period + 1)
    lower_bounds[0] = 1
    # Minimise the peak, where levels @ workers <= peak, and the workers are n_workers in all.
    solution = milp(
        peak,
        integrality=np.append(np.ones(period), 0),
        bounds=Bounds(lower_bounds, np.append(np.full(period, n_workers), np.inf)),
        constraints=[
            LinearConstraint(below_peak, ub=np.zeros(period)),
            LinearConstraint(all_workers[None], n_workers, n_workers),
        ],
        options={"time_limit": seconds},
    )
    if solution.x is None:
        raise UserError(
            f"no offsets of {n_workers} workers within {seconds:g} s: give more seconds"
        )
    return np.rint(solution.x[:period]).astype(int), float(solution.mip_dual_bound)

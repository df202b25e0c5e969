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

    s, n = len(held), whole(n_workers, "the number of workers", 1)
    if not s or not all(x >= 0 for x in held):
        raise UserError(f"held is 0 or more, of each stage: got {[*held]}")
    period = 2 * s
    alive = np.zeros(period)  # of a worker that starts in slot 0
    for j, size in enumerate(held):
        alive[j : period - j] += size
    # Variables: workers that start in each slot, and the peak. One starts in slot 0.
    at = np.stack([np.roll(alive, slot) for slot in range(period)], axis=1)
    rows = [
        LinearConstraint(np.hstack([at, -np.ones((period, 1))]), ub=np.zeros(period)),
        LinearConstraint(np.hstack([np.ones((1, period)), [[0.0]]]), n, n),
    ]
    least = np.zeros(period + 1)
    least[0] = 1
    found = milp(
        np.eye(period + 1)[period],
        integrality=np.append(np.ones(period), 0),
        bounds=Bounds(least, np.append(np.full(period, n), np.inf)),
        constraints=rows,
        options={"time_limit": seconds},
    )
    if found.x is None:
        raise UserError(f"no offsets of {n} workers within {seconds:g} s: give more seconds")
    starting = np.rint(found.x[:period]).astype(int)
    offsets = tuple(np.repeat(np.arange(period), starting).tolist())
    starts = {
        Op(kind, j, m): offset + (j if kind == Kind.FORWARD else period - 1 - j)
        for m, offset in enumerate(offsets)
        for j in range(s)
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    schedule = Schedule("searched offsets", s, n, Timing(starts, period), "one", delay)
    return Staggered(schedule, offsets, float((at @ starting).max()), float(found.mip_dual_bound))

"""Search for rank orders that no catalogue has: unequal stages, unequal ranks, little memory.

List scheduling makes orders from a key of each chain, as if all micro-batches repeated one block.
Annealing changes keys and the ranks of stages, then single places in the orders. A try is timed as
a graph of ops and messages. What is found is timed, and its memory counted, by the simulator.
Problems that :mod:`toolkit.plan.exact` can solve get a proof, or a better bound.
"""

import random
import time

from toolkit.cost import Timeline
from toolkit.errors import UserError, check_seconds
from toolkit.plan import exact as exact_solver
from toolkit.plan.order_annealing import TIE, OrderAnnealing
from toolkit.plan.search_space import OnSearch, SearchResult, SearchSpace
from toolkit.plan.stage_placement import Places

_ATTEMPTS = 5  # to keep to the memory, as the simulator counts it


def search(
    space: SearchSpace,
    *,
    step_seconds: float | None = None,
    exact: bool | None = None,
    catalogue: bool = True,
    seconds: float = 60.0,
    seed: int = 0,
    progress: OnSearch | None = None,
) -> SearchResult:
    """Find rank orders with a short training step on fresh weights.

    Args:
        space: stages, ranks and limits.
        step_seconds: longest training step that will do. To prove that none is so short may take
            half as long again as the search.
        exact: whether to ask OR-tools; None: for few ops, if it is installed.
        catalogue: whether to begin with the catalogue's orders, besides its own.
        seconds: that the search takes, or less if it meets the bound. Orders that the simulator
            finds to take too much memory are searched again, for half as long together.
        seed: of the random changes.
        progress: called about once a second.

    Raises:
        UserError: a rank has no room for one micro-batch, ``exact`` without OR-tools, ``seconds``
            are too few for so many ops, or no step is as short as ``step_seconds``. If that is
            proven, the message names the fewest limits that cannot be met together.
    """
    if step_seconds is not None:
        check_seconds("step_seconds", step_seconds)
    # The result is simulated after the search, within the seconds.
    search_seconds = seconds - space.least_seconds(seconds) / 2
    result = _search_within_memory(
        space,
        search_seconds,
        exact=exact,
        catalogue=catalogue,
        seed=seed,
        progress=progress,
    )
    if step_seconds is not None and result.seconds > step_seconds * (1 + TIE):
        raise UserError(_too_slow(space, result, step_seconds, seconds))
    return result


def _search_within_memory(
    space: SearchSpace,
    search_seconds: float,
    *,
    exact: bool | None,
    catalogue: bool,
    seed: int,
    progress: OnSearch | None,
) -> SearchResult:
    """Search for orders; again with less room while they take too much memory in the simulator.

    The search counts memory a little less exactly than the simulator, which decides.
    """
    end = time.monotonic() + search_seconds
    placements = space.first_placements()
    room = [*space.limits]
    n_tried = 0
    for attempt in range(_ATTEMPTS):
        annealing = OrderAnnealing(space, room, random.Random(seed), progress)
        problem, orders, orders_bound = annealing.best(
            placements, end, exact, catalogue
        )
        n_tried += annealing.n_tried
        # Later attempts have less room than the ranks: their bounds do not hold.
        if attempt == 0:
            bound = orders_bound
        schedule = problem.schedule(orders, "searched")
        timeline = space.simulate(schedule)
        excess_bytes = _excess_bytes(space, timeline)
        if not any(excess_bytes):
            break

        # Messages took more room than foreseen, so the next attempt gets less room.
        # More each time, so that a few attempts are enough.
        for rank, excess in enumerate(excess_bytes):
            room[rank] -= excess * 2**attempt
        placements = [problem.placement]
        end = time.monotonic() + search_seconds / (2 * _ATTEMPTS)
    else:
        memory = [*space.limits]
        raise UserError(
            f"no orders were found in a memory of {memory} bytes: give more, or more seconds"
        )

    # The annealing's bound is of one placement. On any placement only the load bound holds.
    if space.placement_is_free:
        bound = space.load_bound()
    return space.result(schedule, timeline, problem.placement, bound, n_tried)


def _excess_bytes(space: SearchSpace, timeline: Timeline) -> list[float]:
    """Return ``[rank]``, bytes above its limit; 0 for all if that is rounding."""
    peaks = space.peaks(timeline)
    excess_bytes = [
        max(0.0, peak - limit) for peak, limit in zip(peaks, space.limits, strict=True)
    ]
    if max(excess_bytes) <= TIE * max(peaks):
        return [0.0] * len(peaks)
    return excess_bytes


def _ranks_in_conflict(
    space: SearchSpace, placement: Places, step_seconds: float, seconds: float
) -> tuple[int, ...] | None:
    """Return the ranks whose limits exclude such short steps; None if that is not proven."""
    problem = space.problem(placement, space.limits)
    if exact_solver.is_small(problem) and exact_solver.available():
        return exact_solver.conflict(problem, step_seconds, seconds)
    return None


def _too_slow(
    space: SearchSpace, result: SearchResult, step_seconds: float, seconds: float
) -> str:
    """Return the reason why no step is as short as ``step_seconds``."""
    fastest = f"the fastest orders that were found take {result.seconds:.4g} s"
    ranks = None
    if not space.placement_is_free:
        ranks = _ranks_in_conflict(space, result.placement, step_seconds, seconds / 2)
    if ranks is None:
        return (
            f"no orders of {step_seconds:.4g} s a step: {fastest},"
            f" and none less than {result.bound:.4g} s"
        )
    if not ranks:
        return f"no orders take {step_seconds:.4g} s a step in any memory: {fastest}"
    room = ", ".join(f"{space.limits[rank]:.4g} bytes of rank {rank}" for rank in ranks)
    return (
        f"no orders take {step_seconds:.4g} s a step in {room}: {fastest}. Without one of these"
        " limits, orders may exist"
    )

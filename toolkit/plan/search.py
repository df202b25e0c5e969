"""Search for rank orders that no catalogue has: unequal stages, unequal ranks, little memory.

List scheduling makes orders from a key of each chain, as if all micro-batches repeated one block.
Annealing changes keys and the ranks of stages, then single places in the orders. A try is timed as
a graph of ops and messages. What is found is timed, and its memory counted, by the simulator.
Problems that :mod:`toolkit.plan.exact` can solve get a proof, or a better bound.
"""

import random
import time

from toolkit.errors import UserError
from toolkit.plan import exact as exact_solver
from toolkit.plan.order_annealing import TIE, OrderAnnealing
from toolkit.plan.search_space import OnSearch, SearchResult, SearchSpace
from toolkit.plan.stage_placement import Places, load_bound, usual_placements

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
        step_seconds: longest training step that will do.
        exact: whether to ask OR-tools; None: for few ops, if it is installed.
        catalogue: whether to begin with the catalogue's orders, besides its own.
        seconds: that the search takes, or less if it meets the bound.
        seed: of the random changes.
        progress: called about once a second.

    Raises:
        UserError: a rank has no room for one micro-batch, ``exact`` without OR-tools, or no step is
            as short as ``step_seconds``. If that is proven, the message names the fewest limits
            that cannot be met together.
    """
    if space.placement:
        placements = [tuple(space.placement)]
    else:
        placements = usual_placements(space.stage_seconds, space.speeds)
    placement_is_free = _placement_is_free(space)
    room = [*space.limits]
    n_tried = 0
    bounds = []
    end = time.monotonic() + seconds
    for attempt in range(_ATTEMPTS):
        annealing = OrderAnnealing(space, room, random.Random(seed), progress)
        problem, orders, bound = annealing.best(
            placements, placement_is_free, end, exact, catalogue
        )
        n_tried += annealing.n_tried
        bounds.append(bound)
        schedule = problem.schedule(orders, "searched")
        timeline = space.simulate(schedule)
        peaks = space.peaks(timeline)
        excess_bytes = [
            max(0.0, peak - limit) for peak, limit in zip(peaks, space.limits, strict=True)
        ]
        if max(excess_bytes) <= TIE * max(peaks):
            break

        # Messages took more room than foreseen, so the next attempt gets less room.
        for rank, excess in enumerate(excess_bytes):
            room[rank] -= excess * 2**attempt
        placements = [problem.placement]
        end = time.monotonic() + seconds / 4
    else:
        raise UserError(
            f"no orders were found in a memory of {[*space.limits]} bytes: give more, or more"
            " seconds"
        )

    # Only the first attempt's bound holds: later attempts have less room than the ranks.
    bound = bounds[0]
    if placement_is_free:
        bound = space.n_microbatches * load_bound(space.stage_seconds, space.speeds)
    if step_seconds is not None and timeline.step_time > step_seconds * (1 + TIE):
        fastest = f"the fastest orders that were found take {timeline.step_time:.4g} s"
        ranks = None
        if not placement_is_free:
            ranks = _ranks_in_conflict(space, problem.placement, step_seconds, seconds)
        raise UserError(_too_slow(space, step_seconds, ranks, fastest, bound))
    return space.result(schedule, timeline, problem.placement, bound, n_tried)


def _placement_is_free(space: SearchSpace) -> bool:
    """Whether the search changes placements; equal ranks with a stage each have one placement."""
    has_stage_per_rank = space.n_ranks == len(space.costs)
    has_equal_ranks = len({*zip(space.limits, space.speeds, strict=True)}) == 1
    has_equal_links = space.hardware.ranks_per_machine == 1
    return space.placement is None and not (
        has_stage_per_rank and has_equal_ranks and has_equal_links
    )


def _ranks_in_conflict(
    space: SearchSpace, placement: Places, step_seconds: float, seconds: float
) -> tuple[int, ...] | None:
    """Return the ranks whose limits exclude such short steps; None if that is not proven."""
    problem = space.problem(placement, space.limits)
    if exact_solver.is_small(problem) and exact_solver.available():
        return exact_solver.conflict(problem, step_seconds, seconds)
    return None


def _too_slow(
    space: SearchSpace,
    step_seconds: float,
    ranks: tuple[int, ...] | None,
    fastest: str,
    bound: float,
) -> str:
    """Return the reason why no step is as short as ``step_seconds``."""
    if ranks is None:
        return (
            f"no orders of {step_seconds:.4g} s a step: {fastest}, and none less than {bound:.4g} s"
        )
    if not ranks:
        return f"no orders take {step_seconds:.4g} s a step in any memory: {fastest}"
    room = ", ".join(f"{space.limits[rank]:.4g} bytes of rank {rank}" for rank in ranks)
    return (
        f"no orders take {step_seconds:.4g} s a step in {room}: {fastest}. Without one of these"
        " limits, orders may exist"
    )

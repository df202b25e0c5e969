"""Search for pipelines that never drain: late weights, and one block for all micro-batches.

Every micro-batch repeats one block of ops, an interval after the one before, as in PipeDream-2BW
and in cyclic data parallelism with a rank for each stage. A step takes as many intervals as it has
micro-batches, so that the interval is at least the time of the busiest rank. How long a micro-batch
is under way decides the memory. The search packs blocks at random, beginning with the shortest
interval and the best balanced placement.
"""

import random
import time
from collections.abc import Sequence
from itertools import product
from math import ceil

from toolkit.cost import UNIT, Costs, Hardware
from toolkit.errors import UserError, whole
from toolkit.plan.order_problem import OrderProblem, order_problem
from toolkit.plan.search import Found, Progress, simulated
from toolkit.plan.stage_placement import busiest, levelled, room_of, shapes
from toolkit.schedule import Assigned, Op, Schedule, Timing
from toolkit.schedule.staleness import Delay

_LONGER = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)
"""Intervals that are tried, by the time of the busiest rank."""


def search_steady(
    costs: Costs,
    n_microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    hardware: Hardware = UNIT,
    memory: float | Sequence[float] | None = None,
    delay: Delay = 1,
    split_backward: bool = False,
    optimizer_bytes: Sequence[float] = (),
    seconds: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """Find a pipeline on weights one step late or more that never drains.

    Args:
        costs: one entry per stage.
        n_microbatches: of a training step.
        ranks: devices, by default one a stage.
        placement: ``[stage]``, its rank; None: a balanced one.
        hardware: as in :func:`toolkit.plan.search`.
        memory: as in :func:`toolkit.plan.search`.
        delay: as in :class:`Schedule`.
        split_backward: whether backwards of inputs and weights are separate ops.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.
        seconds: of the search, at most.
        seed: of the random blocks.
        progress: called before each interval and placement.

    Raises:
        UserError: arguments do not fit together, or no block fits into the memory.
    """
    microbatches_per_step = whole(n_microbatches, "the number of micro-batches", 1)
    stage_room = room_of(costs, ranks, placement, hardware, memory)
    work = stage_room.work
    speeds = stage_room.speeds
    limits = stage_room.limits
    n_ranks = len(limits)
    draw, problems = random.Random(seed), []
    places = [tuple(placement)] if placement else shapes(work, speeds)
    if not placement and len(costs) > n_ranks:
        places += [levelled(stage_ranks, work, speeds, draw) for stage_ranks in places]
    for stage_ranks in dict.fromkeys(places):
        # Ranks keep a second version of the weights, which late ops read.
        version_bytes = [0.0] * n_ranks
        for stage, rank in enumerate(stage_ranks):
            version_bytes[rank] += costs[stage].parameter_bytes
        room = [
            limit - extra_bytes for limit, extra_bytes in zip(limits, version_bytes, strict=True)
        ]
        try:
            problem = order_problem(
                costs,
                microbatches_per_step,
                stage_ranks,
                hardware,
                split_backward,
                room,
                optimizer_bytes,
            )
        except UserError as error:  # no room for one micro-batch
            room_error = error
        else:
            problems.append(problem)
    if not problems:
        raise room_error
    least_seconds = microbatches_per_step * (
        busiest(work, speeds) if placement is None else _load(problems[0])
    )
    attempts = sorted(product(_LONGER, problems), key=lambda pair: pair[0] * _load(pair[1]))
    n_tried, end = 0, time.monotonic() + seconds
    for index, (stretch, problem) in enumerate(attempts):
        if progress:
            progress("packing", stretch * microbatches_per_step * _load(problem), least_seconds)
        attempt_end = time.monotonic() + (end - time.monotonic()) / (len(attempts) - index)
        is_first = True
        while is_first or time.monotonic() < attempt_end:
            is_first, n_tried = False, n_tried + 1
            tick = problem.tick()
            interval = ceil(stretch * max(_ticks(problem, tick, rank) for rank in range(n_ranks)))
            starts = _block(problem, tick, interval, draw)
            if starts is None or not _fits(problem, starts, tick, interval):
                continue
            try:
                schedule = _schedule(problem, starts, tick, interval, delay)
            except UserError:  # a micro-batch takes too long for this delay
                continue
            timeline = simulated(schedule, costs, hardware, optimizer_bytes)
            peaks = tuple(timeline.peak_memory(rank) for rank in range(n_ranks))
            if any(peak > limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True)):
                continue
            step_seconds = timeline.step_time
            proven = step_seconds <= least_seconds * (1 + 1e-3)
            return Found(
                schedule,
                step_seconds,
                min(least_seconds, step_seconds),
                proven,
                peaks,
                problem.placement,
                n_tried,
            )
    raise UserError(
        f"no pipeline with delay {delay} was found in a memory of {[*limits]} bytes: give more, or"
        " more micro-batches in a training step"
    )


def _load(problem: OrderProblem) -> float:
    """Return the seconds of the busiest rank for a micro-batch."""
    return max(map(problem.load, range(problem.n_ranks))) / problem.n_microbatches


def _lasts(problem: OrderProblem, tick: float, chain: int) -> int:
    """Return the ticks of a chain's op, at least 1, rounded up."""
    return max(1, ceil(problem.seconds[chain] / tick - 1e-6))


def _ticks(problem: OrderProblem, tick: float, rank: int) -> int:
    """Return the ticks that a rank computes on a micro-batch."""
    return sum(_lasts(problem, tick, chain) for chain in problem.of_rank[rank])


def _block(
    problem: OrderProblem, tick: float, interval: int, draw: random.Random
) -> list[int] | None:
    """Place a micro-batch's ops at random; return their starts in ticks, or None without a gap.

    Each op starts about as soon as its rank has a gap for it. An op next to another one leaves one
    gap instead of two, which a full rank needs.
    """
    n_kinds, n_stages = len(problem.kinds), len(problem.held)
    order = [
        *range(0, n_kinds * n_stages, n_kinds),
        *range(n_kinds * (n_stages - 1) + 1, 0, -n_kinds),
        *range(2, n_kinds * n_stages, n_kinds),
    ][: n_kinds * n_stages]
    busy: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_ranks)]
    starts, patience = [0] * (n_kinds * n_stages), draw.random()
    for chain in order:
        rank, op_ticks = problem.placement[chain // n_kinds], _lasts(problem, tick, chain)
        ready = max(
            (starts[needed_chain] + _lasts(problem, tick, needed_chain) + ceil(lag / tick - 1e-6)
             for needed_chain, lag in problem.needs[chain]),
            default=0,
        )  # fmt: skip
        adjacent_starts = [
            start_tick
            for begin, busy_ticks in busy[rank]
            for start_tick in (begin + busy_ticks, begin - op_ticks)
        ]
        possible_starts = sorted(
            {ready + (start_tick - ready) % interval for start_tick in (*adjacent_starts, ready)}
            - ({ready} if adjacent_starts and draw.random() < patience else set())
        )
        for start in possible_starts:
            fits_beside = (
                (start - begin) % interval >= busy_ticks and (begin - start) % interval >= op_ticks
                for begin, busy_ticks in busy[rank]
            )
            if all(fits_beside):
                break
        else:
            return None
        starts[chain] = start
        busy[rank].append((start, op_ticks))
    return starts


def _fits(problem: OrderProblem, starts: Sequence[int], tick: float, interval: int) -> bool:
    """Whether ranks have room for the micro-batches under way.

    Memory grows only where an op starts, so it is counted there.
    """
    n_kinds = len(problem.kinds)
    for rank, chains in enumerate(problem.of_rank):
        for chain in chains:
            start, held_bytes = starts[chain], problem.work[chain]
            for stage in (
                rank_chain // n_kinds for rank_chain in chains if rank_chain % n_kinds == 0
            ):
                last_chain = stage * n_kinds + n_kinds - 1
                backward_end = starts[last_chain] + _lasts(problem, tick, last_chain)
                n_in_flight = (start - starts[stage * n_kinds]) // interval - (
                    start - backward_end
                ) // interval
                held_bytes += n_in_flight * problem.held[stage]
            if held_bytes > problem.room[rank]:
                return False
    return True


def _schedule(
    problem: OrderProblem, starts: Sequence[int], tick: float, interval: int, delay: Delay
) -> Schedule:
    """Repeat the block for all micro-batches.

    A slot is no longer than any op, and divides the period.
    """
    n_kinds, n_microbatches = len(problem.kinds), problem.n_microbatches
    ops = {
        Op(problem.kinds[chain % n_kinds], chain // n_kinds, microbatch): start
        + microbatch * interval
        for chain, start in enumerate(starts)
        for microbatch in range(n_microbatches)
    }
    shortest = min(_lasts(problem, tick, chain) for chain in range(len(starts)))
    slot = max(
        divisor for divisor in range(1, shortest + 1) if n_microbatches * interval % divisor == 0
    )
    layout = Assigned([[rank] * n_microbatches for rank in problem.placement], "per_stage")
    timing = Timing(ops, n_microbatches * interval, slot)
    return Schedule("searched", len(problem.held), n_microbatches, timing, layout, delay)

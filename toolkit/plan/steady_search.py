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
    m = whole(n_microbatches, "the number of micro-batches", 1)
    given_room = room_of(costs, ranks, placement, hardware, memory)
    work, speeds, limits = given_room.work, given_room.speeds, given_room.limits
    p = len(limits)
    draw, problems = random.Random(seed), []
    places = [tuple(placement)] if placement else shapes(work, speeds)
    if not placement and len(costs) > p:
        places += [levelled(where, work, speeds, draw) for where in places]
    for where in dict.fromkeys(places):
        # Besides the newest version, one that late ops read.
        more = [0.0] * p
        for j, rank in enumerate(where):
            more[rank] += costs[j].parameter_bytes
        room = [limit - bytes_ for limit, bytes_ in zip(limits, more, strict=True)]
        try:
            given = costs, m, where, hardware, split_backward, room, optimizer_bytes
            problems.append(order_problem(*given))
        except UserError as error:  # no room for one micro-batch
            refused = error
    if not problems:
        raise refused
    least = m * (busiest(work, speeds) if placement is None else _load(problems[0]))
    tries = sorted(product(_LONGER, problems), key=lambda pair: pair[0] * _load(pair[1]))
    tried, end = 0, time.monotonic() + seconds
    for k, (longer, problem) in enumerate(tries):
        if progress:
            progress("packing", longer * m * _load(problem), least)
        until = time.monotonic() + (end - time.monotonic()) / (len(tries) - k)
        first = True
        while first or time.monotonic() < until:
            first, tried = False, tried + 1
            tick = problem.tick()
            interval = ceil(longer * max(_ticks(problem, tick, r) for r in range(p)))
            starts = _block(problem, tick, interval, draw)
            if starts is None or not _fits(problem, starts, tick, interval):
                continue
            try:
                schedule = _schedule(problem, starts, tick, interval, delay)
            except UserError:  # a micro-batch takes too long for this delay
                continue
            timeline = simulated(schedule, costs, hardware, optimizer_bytes)
            peaks = tuple(timeline.peak_memory(rank) for rank in range(p))
            if any(peak > limit * (1 + 1e-9) for peak, limit in zip(peaks, limits, strict=True)):
                continue
            took = timeline.step_time
            proven = took <= least * (1 + 1e-3)
            return Found(schedule, took, min(least, took), proven, peaks, problem.placement, tried)
    raise UserError(
        f"no pipeline with delay {delay} was found in a memory of {[*limits]} bytes: give more, or"
        " more micro-batches in a training step"
    )


def _load(problem: OrderProblem) -> float:
    """Seconds of the busiest rank for a micro-batch."""
    return max(map(problem.load, range(problem.n_ranks))) / problem.n_microbatches


def _lasts(problem: OrderProblem, tick: float, c: int) -> int:
    return max(1, ceil(problem.seconds[c] / tick - 1e-6))


def _ticks(problem: OrderProblem, tick: float, rank: int) -> int:
    return sum(_lasts(problem, tick, c) for c in problem.of_rank[rank])


def _block(
    problem: OrderProblem, tick: float, interval: int, draw: random.Random
) -> list[int] | None:
    """When a micro-batch's ops start, in ticks: each about as soon as its rank has a gap for it.

    An op next to another leaves one gap instead of two, which a full rank needs.
    """
    n, s = len(problem.kinds), len(problem.held)
    order = [*range(0, n * s, n), *range(n * (s - 1) + 1, 0, -n), *range(2, n * s, n)][: n * s]
    busy: list[list[tuple[int, int]]] = [[] for _ in range(problem.n_ranks)]
    starts, patient = [0] * (n * s), draw.random()
    for c in order:
        rank, lasts = problem.placement[c // n], _lasts(problem, tick, c)
        ready = max(
            (starts[d] + _lasts(problem, tick, d) + ceil(lag / tick - 1e-6)
             for d, lag in problem.needs[c]),
            default=0,
        )  # fmt: skip
        beside = [x for begin, took in busy[rank] for x in (begin + took, begin - lasts)]
        able = sorted(
            {ready + (x - ready) % interval for x in (*beside, ready)}
            - ({ready} if beside and draw.random() < patient else set())
        )
        for start in able:
            gaps = (
                (start - begin) % interval >= took and (begin - start) % interval >= lasts
                for begin, took in busy[rank]
            )
            if all(gaps):
                break
        else:
            return None
        starts[c] = start
        busy[rank].append((start, lasts))
    return starts


def _fits(problem: OrderProblem, starts: Sequence[int], tick: float, interval: int) -> bool:
    """Whether ranks have room for the micro-batches under way."""
    n = len(problem.kinds)
    for rank, chains in enumerate(problem.of_rank):
        for c in chains:
            now, held = starts[c], problem.work[c]
            for j in (d // n for d in chains if d % n == 0):
                last = j * n + n - 1
                gone = starts[last] + _lasts(problem, tick, last)
                alive = (now - starts[j * n]) // interval - (now - gone) // interval
                held += alive * problem.held[j]
            if held > problem.room[rank]:
                return False
    return True


def _schedule(
    problem: OrderProblem, starts: Sequence[int], tick: float, interval: int, delay: Delay
) -> Schedule:
    """The block, repeated. A slot is no longer than any op, and divides the period."""
    n, m = len(problem.kinds), problem.n_microbatches
    ops = {
        Op(problem.kinds[c % n], c // n, k): start + k * interval
        for c, start in enumerate(starts)
        for k in range(m)
    }
    shortest = min(_lasts(problem, tick, c) for c in range(len(starts)))
    slot = max(k for k in range(1, shortest + 1) if m * interval % k == 0)
    layout = Assigned([[rank] * m for rank in problem.placement], "per_stage")
    timing = Timing(ops, m * interval, slot)
    return Schedule("searched", len(problem.held), m, timing, layout, delay)

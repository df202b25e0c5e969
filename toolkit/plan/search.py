"""Search for rank orders that no catalogue has: unequal stages, unequal ranks, little memory.

List scheduling makes orders from a key of each chain, as if all micro-batches repeated one block.
Annealing changes keys and the ranks of stages, then single places in the orders. A try is timed as
a graph of ops and messages. What is found is timed, and its memory counted, by the simulator.
Problems that :mod:`toolkit.plan.exact` can solve get a proof, or a better bound.
"""

import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import exp, inf
from typing import TypeVar

from toolkit.cost import UNIT, Costs, Hardware, Timeline, simulate
from toolkit.errors import UserError, whole
from toolkit.plan import exact as _exact
from toolkit.plan.order_problem import OrderProblem, Word, order_problem
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.steady_state import steps_to_time

Progress = Callable[[str, float, float], object]
"""Gets what a search does, the step time found so far and the bound, both in seconds."""

_T = TypeVar("_T")
_Places = tuple[int, ...]
_Block = tuple[_Places, tuple[float, ...]]
"""A placement, and the keys of :func:`list_schedule`."""

_TIE = 1e-9  # relative difference of sums of seconds that are equal
_ROUNDING = 1e-3  # relative difference to a bound in ticks that counts as none
_HEAT = 0.02, 2e-4  # of annealing, first and last, relative to a step
_ATTEMPTS = 5  # to keep to the memory, as the simulator counts it
_EXACT_OPS = 1000  # most ops of a training step for which OR-tools is asked by default


@dataclass(frozen=True)
class Found:
    """What a search found.

    Attributes:
        schedule: verified, to simulate or run.
        seconds: of a training step, simulated.
        bound: seconds below which no orders fall, on any placement that was allowed, in the room
            that :class:`OrderProblem` counts.
        proven: whether ``seconds`` are the least: equal to the bound, up to a thousandth.
        memory: ``[rank]``, peak bytes, simulated.
        placement: ``[stage]``, its rank.
        tried: orders that were timed.
    """

    schedule: Schedule = field(repr=False)
    seconds: float
    bound: float
    proven: bool
    memory: tuple[float, ...]
    placement: tuple[int, ...]
    tried: int


def search(
    costs: Costs,
    n_microbatches: int,
    *,
    ranks: int | None = None,
    placement: Sequence[int] | None = None,
    hardware: Hardware = UNIT,
    memory: float | Sequence[float] | None = None,
    split_backward: bool = True,
    optimizer_bytes: Sequence[float] = (),
    step_seconds: float | None = None,
    exact: bool | None = None,
    catalogue: bool = True,
    seconds: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Found:
    """Find rank orders with a short training step on fresh weights.

    Args:
        costs: one entry per stage.
        n_microbatches: of a training step.
        ranks: devices, by default one a stage.
        placement: ``[stage]``, its rank; None: found, too.
        hardware: seconds of messages and kernels, and the ranks' speeds and memories.
        memory: bytes of a rank, or ``[rank]``; None: those of the hardware.
        split_backward: whether backwards of inputs and weights are separate ops.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.
        step_seconds: longest training step that will do.
        exact: whether to ask OR-tools; None: for few ops, if it is installed.
        catalogue: whether to begin with the catalogue's orders, besides its own.
        seconds: that the search takes, or less if it meets the bound.
        seed: of the random changes.
        progress: called about once a second.

    Raises:
        UserError: arguments do not fit together, a rank has no room for one micro-batch, ``exact``
            without OR-tools, or no step is as short as ``step_seconds``. If that is proven, the
            message names the fewest limits that cannot be met together.
    """
    s, m = len(costs), whole(n_microbatches, "the number of micro-batches", 1)
    p = whole(s if ranks is None else ranks, "the number of ranks", 1)
    if placement is not None:
        p = max(placement, default=0) + 1
    if placement is not None and (len(placement) != s or {*placement} != {*range(p)}):
        raise UserError(
            f"placement is the rank of each of {s} stages, on ranks 0, 1, ...: got {[*placement]}"
        )
    if p > s:
        raise UserError(f"each of {p} ranks runs a stage: got {s} stages")
    usual = [hardware.memory_of(rank) for rank in range(p)]
    limits = usual if memory is None else memory
    limits = [limits] * p if isinstance(limits, int | float) else limits
    if len(limits) != p:
        raise UserError(f"memory has an entry for each of {p} ranks: got {len(limits)}")
    equal = len({(limits[r], hardware.speed(r)) for r in range(p)}) == 1
    free = placement is None and not (p == s and equal and hardware.ranks_per_machine == 1)
    work = [sum(cost.seconds(hardware)) for cost in costs]
    speeds = [hardware.speed(rank) for rank in range(p)]
    starts = [tuple(placement)] if placement is not None else shapes(work, speeds)
    room, tried, end = [*limits], 0, time.monotonic() + seconds
    bounds: list[float] = []
    for attempt in range(_ATTEMPTS):

        def make(where: _Places, room: Sequence[float] = tuple(room)) -> OrderProblem:
            given = costs, m, where, hardware, split_backward, room, optimizer_bytes
            return order_problem(*given)

        run = _Search(make, random.Random(seed), progress)
        problem, words, bound = run.best(starts, free, end, exact, catalogue)
        tried += run.tried
        bounds.append(bound)
        schedule = problem.schedule(words, "searched")
        timeline = simulated(schedule, costs, hardware, optimizer_bytes)
        peaks = tuple(timeline.peak_memory(rank) for rank in range(p))
        over = [max(0.0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]
        if max(over) <= _TIE * max(peaks):
            break
        # Messages took more room than foreseen.
        room = [space - more * 2**attempt for space, more in zip(room, over, strict=True)]
        starts, end = [problem.placement], time.monotonic() + seconds / 4
    else:
        raise UserError(
            f"no orders were found in a memory of {[*limits]} bytes: give more, or more seconds"
        )
    bound = m * busiest(work, speeds) if free else bounds[0]  # later ones have less room
    took = timeline.step_time
    if step_seconds is not None and took > step_seconds * (1 + _TIE):
        given = None if free else make(problem.placement, limits)
        raise UserError(_too_slow(given, step_seconds, took, bound, limits, seconds))
    bound, proven = min(bound, took), took <= bound * (1 + _ROUNDING)
    return Found(schedule, took, bound, proven, peaks, problem.placement, tried)


def busiest(work: Sequence[float], speeds: Sequence[float]) -> float:
    """Seconds of the busiest rank, at least, wherever stages of ``work`` seconds are placed."""
    p, largest = len(speeds), sorted(work, reverse=True)
    two = sum(largest[p - 1 : p + 1]) if len(work) > p else 0.0  # of p + 1, a rank runs two
    return max(sum(work) / sum(speeds), max(two, largest[0]) / max(speeds))


def _too_slow(
    problem: OrderProblem | None,
    step_seconds: float,
    took: float,
    bound: float,
    limits: Sequence[float],
    seconds: float,
) -> str:
    """Why no step is as short as ``step_seconds``."""
    fastest = f"the fastest orders that were found take {took:.4g} s"
    if problem is not None and problem.n_ops <= _EXACT_OPS and _exact.available():
        ranks = _exact.conflict(problem, step_seconds, seconds)
        if ranks == ():
            return f"no orders take {step_seconds:.4g} s a step in any memory: {fastest}"
        if ranks is not None:
            room = ", ".join(f"{limits[rank]:.4g} bytes of rank {rank}" for rank in ranks)
            return (
                f"no orders take {step_seconds:.4g} s a step in {room}: {fastest}. Without one of"
                " these limits, orders may exist"
            )
    return f"no orders of {step_seconds:.4g} s a step: {fastest}, and none less than {bound:.4g} s"


def _fits(problem: OrderProblem, words: list[Word]) -> bool:
    """Whether ranks have room, for messages that wait, too."""
    held = problem.peaks(words)
    return all(most <= room * (1 + _TIE) for most, room in zip(held, problem.room, strict=True))


def simulated(
    schedule: Schedule, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
) -> Timeline:
    """Training steps of a schedule up to its steady state, verified."""
    program = schedule.lower(steps_to_time(schedule)).verify()
    return simulate(program, costs, hardware, optimizer_bytes)


class _Search:
    """Random changes, and what they found."""

    def __init__(
        self, make: Callable[[_Places], OrderProblem], draw: random.Random, say: Progress | None
    ) -> None:
        self.make, self.draw, self.say = lru_cache(1000)(make), draw, say
        self.tried, self.said = 0, time.monotonic()

    def best(
        self,
        starts: Sequence[_Places],
        free: bool,
        end: float,
        exact: bool | None,
        catalogue: bool = True,
    ) -> tuple[OrderProblem, list[Word], float]:
        """The best orders, of the best placement if they are free to change, and its bound."""
        begin, left = time.monotonic(), end - time.monotonic()
        blocks: list[_Block] = []
        orders: list[tuple[OrderProblem, list[Word]]] = []
        for where in starts:
            try:
                problem = self.make(where)
            except UserError as error:  # a rank has no room
                refused = error
                continue
            blocks += [(where, keys) for keys in _simple_keys(problem)]
            if catalogue:
                orders += [(problem, words) for words in _catalogued(problem)]
        if not blocks:
            raise refused
        block = min(blocks, key=self.seconds)
        problem = self.make(block[0])
        bound = 0.0 if free else problem.bound()
        ask = _exact.available() if exact is None else exact
        block = self.blocks(block, free, begin + (0.3 if ask else 0.5) * left, bound)
        problem, words = self.make(block[0]), self.listed(block)
        if ask and problem.merged is not problem and problem.merged.n_ops <= _EXACT_OPS:
            words, _ = self.solved(problem.merged, words, begin + 0.6 * left)
        orders.append((problem, problem.split(words)))
        problem, words = min(
            orders, key=lambda order: (not _fits(*order), order[0].period(order[1]))
        )
        bound = problem.bound()
        ask = ask and (problem.n_ops <= _EXACT_OPS or exact is True)
        left = end - time.monotonic()
        words = self.places(problem, words, end - (0.7 * left if ask else 0.0), bound)
        if ask and problem.period(words) > bound * (1 + _TIE):
            words, proven = self.solved(problem, words, end)
            bound = max(bound, proven)
        return problem, words, bound

    def solved(
        self, problem: OrderProblem, words: list[Word], end: float
    ) -> tuple[list[Word], float]:
        """``words`` or better ones, and a bound, by OR-tools."""
        seconds = max(1.0, end - time.monotonic())
        found, bound = _exact.solve(problem, words, seconds, self.report)
        better = _fits(problem, found) or not _fits(problem, words)
        return found if better else words, bound

    def listed(self, block: _Block) -> list[Word]:
        """Orders of merged stages: forwards have the keys of the first, backwards of the last."""
        problem, (interval, patience, *keys) = self.make(block[0]), block[1]
        n = len(problem.kinds)
        own = [keys[g[0 if k == 0 else -1] * n + k] for g in problem.groups for k in range(n)]
        return list_schedule(problem.merged, [interval, patience, *own])

    def seconds(self, block: _Block) -> float:
        """Of a training step; infinite if a rank has no room."""
        try:
            problem = self.make(block[0]).merged
        except UserError:
            return inf
        return problem.period(self.listed(block))

    def blocks(self, block: _Block, free: bool, end: float, bound: float) -> _Block:
        """Anneal keys, and ranks of stages if they are free."""
        draw, longest = self.draw, max(self.make(block[0]).seconds)

        def change(block: _Block) -> _Block:
            where, (interval, patience, *keys) = [*block[0]], block[1]
            if free and draw.random() < 0.5:
                i, j = draw.randrange(len(where)), draw.randrange(len(where))
                if draw.random() < 0.7 and where.count(where[i]) > 1:
                    near = (max(i - 1, 0), min(i + 1, len(where) - 1))
                    where[i] = where[draw.choice((j, *near))]
                else:
                    where[i], where[j] = where[j], where[i]
            else:
                size = interval * draw.choice((0.2, 1.0, 4.0))
                for _ in range(draw.choice((1, 1, 2, 4))):
                    keys[draw.randrange(len(keys))] += draw.gauss(0, size)
                if draw.random() < 0.2:
                    interval *= exp(draw.gauss(0, 0.2))
                if draw.random() < 0.2:
                    patience = draw.choice((0.0, draw.random())) * longest
            return tuple(where), (interval, patience, *keys)

        def fits(block: _Block) -> bool:
            return _fits(self.make(block[0]).merged, self.listed(block))

        return self.anneal(block, change, self.seconds, fits, end, bound)

    def places(
        self, problem: OrderProblem, words: list[Word], end: float, bound: float
    ) -> list[Word]:
        """Anneal single places of ops in the orders."""
        draw = self.draw

        def change(words: list[Word]) -> list[Word]:
            rank = draw.randrange(len(words))
            word = [*words[rank]]
            at = draw.randrange(len(word))
            to = at + draw.choice((-1, 1)) * int(1 + draw.expovariate(0.4))
            word.insert(min(max(to, 0), len(word) - 1), word.pop(at))
            if not problem.fits(rank, word):
                return words
            return [*words[:rank], word, *words[rank + 1 :]]

        fits = partial(_fits, problem)
        return self.anneal(words, change, problem.period, fits, end, bound)

    def anneal(
        self,
        given: _T,
        change: Callable[[_T], _T],
        seconds: Callable[[_T], float],
        fits: Callable[[_T], bool],
        end: float,
        bound: float,
    ) -> _T:
        """The best of many changes, until ``end`` or the ``bound``; early on, worse ones pass."""
        now = best = given
        took = seconds(given)
        least = took if fits(given) else inf
        begin = at = time.monotonic()
        hot, cold = _HEAT
        while at < end and least > bound * (1 + _TIE):
            heat = hot * (cold / hot) ** ((at - begin) / (end - begin)) * took
            at = time.monotonic()
            tried = change(now)
            if tried is now:
                continue
            self.tried += 1
            new = seconds(tried)
            if new <= took or self.draw.random() < exp((took - new) / heat):
                now, took = tried, new
                if took < least and fits(now):
                    best, least = now, took
            self.report("annealing", least, bound)
        return best

    def report(self, what: str, seconds: float, bound: float) -> None:
        """Call ``progress``, at most once a second."""
        if self.say and (now := time.monotonic()) - self.said > 1:
            self.said = now
            self.say(what, seconds, bound)


def list_schedule(problem: OrderProblem, keys: Sequence[float]) -> list[Word]:
    """Each rank runs next, of what it can begin soon, the op with the least key.

    A forward waits where the rank's micro-batches could then no longer end, the oldest first.

    Args:
        problem: what to order.
        keys: seconds between micro-batches, seconds for which a rank waits for a lower key, and
            those of each chain's op on micro-batch 0.
    """
    interval, patience, *offsets = keys
    m, n, needs, sizes = problem.n_microbatches, len(problem.kinds), problem.needs, problem.held
    ranks = range(problem.n_ranks)
    ends: list[list[float]] = [[] for _ in offsets]
    words: list[Word] = [[] for _ in ranks]
    free = [0.0 for _ in ranks]
    own = [[c // n for c in chains if c % n == 0] for chains in problem.of_rank]
    whole_model = [sum(sizes[j] for j in stages) for stages in own]
    most = [max(problem.work[c] for c in chains) for chains in problem.of_rank]
    space = [room - work for room, work in zip(problem.room, most, strict=True)]

    def fits(rank: int, stage: int) -> bool:
        left = space[rank] - sizes[stage]
        if left >= whole_model[rank]:
            return True
        made = {j: len(ends[j * n]) + (j == stage) for j in own[rank]}
        ended = {j: len(ends[j * n + n - 1]) for j in own[rank]}
        for k in range(min(ended.values()), max(made.values())):
            if sum(sizes[j] for j in own[rank] if made[j] <= k) > left:
                return False
            left += sum(sizes[j] for j in own[rank] if ended[j] <= k < made[j])
        return left >= 0

    def choose(rank: int) -> tuple[float, int]:
        """When the rank begins its next op, and the op's chain; -1 if it has none."""
        able, soonest, now = [], inf, free[rank]
        for c in problem.of_rank[rank]:
            k = len(ends[c])
            if k == m:
                continue
            start = now
            for d, lag in needs[c]:
                found = ends[d]
                if len(found) <= k:
                    break
                if found[k] + lag > start:
                    start = found[k] + lag
            else:
                if c % n or fits(rank, c // n):
                    able.append((offsets[c] + k * interval, start, c))
                    soonest = min(soonest, start)
        return min((ch for ch in able if ch[1] <= soonest + patience), default=(0, inf, -1))[1:]

    choices = [choose(rank) for rank in ranks]
    while able := [(*choices[rank], rank) for rank in ranks if choices[rank][1] >= 0]:
        start, c, rank = min(able)
        free[rank] = start + problem.seconds[c]
        ends[c].append(free[rank])
        words[rank].append(c)
        if c % n in (0, n - 1):
            space[rank] += sizes[c // n] if c % n else -sizes[c // n]
        for user in problem.users[c]:
            choices[user] = choose(user)
    return words


def _simple_keys(problem: OrderProblem) -> Iterator[tuple[float, ...]]:
    """Keys by the times of a lone micro-batch; weights at once, or when a rank would wait."""
    n, s = len(problem.kinds), len(problem.held)
    alone, now = [0.0] * len(problem.seconds), 0.0
    for c in (*range(0, n * s, n), *range(n * (s - 1) + 1, 0, -n)):
        alone[c] = now
        now += problem.seconds[c]
    busy = max(map(problem.load, range(problem.n_ranks))) / problem.n_microbatches
    for interval in (busy / 2, busy, 2 * busy):
        for ahead in (0.0, now):  # of the backwards
            for late in (0.0, now, 100 * now) if n == 3 else (0.0,):
                keys = [at + (0 if c % n else ahead) for c, at in enumerate(alone)]
                for c in range(2, len(keys), 3) if n == 3 else ():
                    keys[c] = keys[c - 1] + late
                yield (interval, 0.0, *keys)


def _catalogued(problem: OrderProblem) -> Iterator[list[Word]]:
    """Orders of the catalogue that have this placement, and room."""
    s = len(problem.held)
    for method in catalog.METHODS.values():
        if method.kind != "pipeline":
            continue
        options = {"n_ranks": problem.n_ranks} if "n_ranks" in method.options else {}
        try:
            schedule = method(s, problem.n_microbatches, **options)
        except UserError:  # these sizes do not suit it
            continue
        alike = problem.placement == tuple(schedule.rank(j, 0) for j in range(s))
        if alike and not schedule.max_staleness and schedule.splits_backward == problem.splits:
            words = problem.words(schedule)
            if all(map(problem.fits, range(problem.n_ranks), words)):
                yield words


def shapes(work: Sequence[float], speeds: Sequence[float]) -> list[_Places]:
    """Neighbours on a rank, stages in turn, and to and fro; then the same, balanced."""
    p, s = len(speeds), len(work)
    there = [*range(p), *reversed(range(p))]
    ranks = ((j * p // s, j % p, there[j % (2 * p)]) for j in range(s))
    rows = ([*range(p)], there, [*range(p)] * 2, there[::-1])
    balanced = (_balanced(row, work, speeds) for row in rows if len(row) <= s)
    return [*dict.fromkeys((*zip(*ranks, strict=True), *balanced))]


def _balanced(row: Sequence[int], work: Sequence[float], speeds: Sequence[float]) -> _Places:
    """Ranks of stages, of neighbours in the order of ``row``, where the busiest is least busy."""
    draw, s = random.Random(0), len(work)

    def places(cuts: Sequence[int]) -> _Places:
        return tuple(row[bisect_right(cuts, j)] for j in range(s))

    def loads(cuts: Sequence[int]) -> list[float]:
        found = [0.0] * len(speeds)
        for seconds, rank in zip(work, places(cuts), strict=True):
            found[rank] += seconds / speeds[rank]
        return sorted(found, reverse=True)

    best = [k * s // len(row) for k in range(1, len(row))]
    for _ in range(100 * len(row)):
        tried = [*best]
        for _ in range(draw.choice((1, 1, 2, 3))):
            tried[draw.randrange(len(tried))] += draw.choice((-1, 1))
        if [0, *tried, s] == sorted({0, *tried, s}) and loads(tried) <= loads(best):
            best = tried
    return places(best)

"""Search for rank orders that no catalogue has: unequal stages, unequal ranks, little memory.

List scheduling makes orders from a key of each chain, as if all micro-batches repeated one block.
Annealing changes keys and the ranks of stages, then single places in the orders. A try is timed as
a graph of ops and messages. What is found is timed, and its memory counted, by the simulator.
Problems that :mod:`toolkit.plan.exact` can solve get a proof, or a better bound.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import exp, inf
from typing import TypeVar

from toolkit.cost import UNIT, Costs, Hardware, Timeline, simulate
from toolkit.errors import UserError, whole
from toolkit.plan import exact as _exact
from toolkit.plan.list_schedule import list_schedule, simple_keys
from toolkit.plan.order_problem import OrderProblem, Word, order_problem
from toolkit.plan.stage_placement import Places, busiest, room_of, shapes
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.steady_state import steps_to_time

Progress = Callable[[str, float, float], object]
"""Gets what a search does, the step time found so far and the bound, both in seconds."""

_T = TypeVar("_T")
_Block = tuple[Places, tuple[float, ...]]
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
    m, s = whole(n_microbatches, "the number of micro-batches", 1), len(costs)
    given_room = room_of(costs, ranks, placement, hardware, memory)
    work, speeds, limits = given_room.work, given_room.speeds, given_room.limits
    p = len(limits)
    equal = len({*zip(limits, speeds, strict=True)}) == 1
    free = placement is None and not (p == s and equal and hardware.ranks_per_machine == 1)
    starts = [tuple(placement)] if placement else shapes(work, speeds)
    room, tried, end = [*limits], 0, time.monotonic() + seconds
    bounds: list[float] = []
    for attempt in range(_ATTEMPTS):

        def make(where: Places, room: Sequence[float] = tuple(room)) -> OrderProblem:
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
        self, make: Callable[[Places], OrderProblem], draw: random.Random, say: Progress | None
    ) -> None:
        self.make, self.draw, self.say = lru_cache(1000)(make), draw, say
        self.tried, self.said = 0, time.monotonic()

    def best(
        self,
        starts: Sequence[Places],
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
            blocks += [(where, keys) for keys in simple_keys(problem)]
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
        ranks = zip(*schedule.layout.cycles, strict=True)  # of each micro-batch
        kinds = {op.kind for op in schedule.timing.starts}  # some pipelines split few backwards
        alike = {*ranks} == {problem.placement} and kinds == {*problem.kinds}
        if alike and not schedule.max_staleness:
            words = problem.words(schedule)
            if all(map(problem.fits, range(problem.n_ranks), words)):
                yield words

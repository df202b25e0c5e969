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
    microbatches_per_step, n_stages = (
        whole(n_microbatches, "the number of micro-batches", 1),
        len(costs),
    )
    stage_room = room_of(costs, ranks, placement, hardware, memory)
    work = stage_room.work
    speeds = stage_room.speeds
    limits = stage_room.limits
    n_ranks = len(limits)
    has_equal_ranks = len({*zip(limits, speeds, strict=True)}) == 1
    placement_is_free = placement is None and not (
        n_ranks == n_stages and has_equal_ranks and hardware.ranks_per_machine == 1
    )
    placements = [tuple(placement)] if placement else shapes(work, speeds)
    room, n_tried, end = [*limits], 0, time.monotonic() + seconds
    bounds: list[float] = []
    for attempt in range(_ATTEMPTS):

        def make(stage_ranks: Places, room: Sequence[float] = tuple(room)) -> OrderProblem:
            return order_problem(
                costs,
                microbatches_per_step,
                stage_ranks,
                hardware,
                split_backward,
                room,
                optimizer_bytes,
            )

        attempt_search = _Search(make, random.Random(seed), progress)
        problem, rank_orders, bound = attempt_search.best(
            placements, placement_is_free, end, exact, catalogue
        )
        n_tried += attempt_search.tried
        bounds.append(bound)
        schedule = problem.schedule(rank_orders, "searched")
        timeline = simulated(schedule, costs, hardware, optimizer_bytes)
        peaks = tuple(timeline.peak_memory(rank) for rank in range(n_ranks))
        excess_bytes = [max(0.0, peak - limit) for peak, limit in zip(peaks, limits, strict=True)]
        if max(excess_bytes) <= _TIE * max(peaks):
            break
        # Messages took more room than foreseen, so the next attempt gets less room.
        room = [
            rank_room - excess * 2**attempt
            for rank_room, excess in zip(room, excess_bytes, strict=True)
        ]
        placements, end = [problem.placement], time.monotonic() + seconds / 4
    else:
        raise UserError(
            f"no orders were found in a memory of {[*limits]} bytes: give more, or more seconds"
        )
    # Only the first attempt's bound holds: later attempts have less room than the ranks.
    bound = microbatches_per_step * busiest(work, speeds) if placement_is_free else bounds[0]
    best_seconds = timeline.step_time
    if step_seconds is not None and best_seconds > step_seconds * (1 + _TIE):
        fixed_problem = None if placement_is_free else make(problem.placement, limits)
        raise UserError(
            _too_slow(fixed_problem, step_seconds, best_seconds, bound, limits, seconds)
        )
    bound, proven = min(bound, best_seconds), best_seconds <= bound * (1 + _ROUNDING)
    return Found(schedule, best_seconds, bound, proven, peaks, problem.placement, n_tried)


def _too_slow(
    problem: OrderProblem | None,
    step_seconds: float,
    best_seconds: float,
    bound: float,
    limits: Sequence[float],
    seconds: float,
) -> str:
    """Return the reason why no step is as short as ``step_seconds``."""
    fastest = f"the fastest orders that were found take {best_seconds:.4g} s"
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


def _fits(problem: OrderProblem, rank_orders: list[Word]) -> bool:
    """Whether ranks have room for activations and for messages that wait."""
    peak_bytes = problem.peaks(rank_orders)
    return all(
        peak <= room * (1 + _TIE) for peak, room in zip(peak_bytes, problem.room, strict=True)
    )


def simulated(
    schedule: Schedule, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
) -> Timeline:
    """Simulate verified training steps of a schedule up to its steady state."""
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
        """Return the best orders, their problem, and a bound on the seconds of a step.

        The time until ``end`` is shared: first keys and placements, then OR-tools on merged
        stages, then single places of ops, and last OR-tools on all stages.
        """
        begin, remaining_seconds = time.monotonic(), end - time.monotonic()
        blocks: list[_Block] = []
        orders: list[tuple[OrderProblem, list[Word]]] = []
        for stage_ranks in starts:
            try:
                problem = self.make(stage_ranks)
            except UserError as error:  # a rank has no room
                room_error = error
                continue
            blocks += [(stage_ranks, chain_keys) for chain_keys in simple_keys(problem)]
            if catalogue:
                orders += [(problem, rank_orders) for rank_orders in _catalogued(problem)]
        if not blocks:
            raise room_error
        block = min(blocks, key=self.seconds)
        problem = self.make(block[0])
        bound = 0.0 if free else problem.bound()
        use_exact = _exact.available() if exact is None else exact
        block = self.blocks(
            block, free, begin + (0.3 if use_exact else 0.5) * remaining_seconds, bound
        )
        problem, rank_orders = self.make(block[0]), self.listed(block)
        if use_exact and problem.merged is not problem and problem.merged.n_ops <= _EXACT_OPS:
            rank_orders, _ = self.solved(
                problem.merged, rank_orders, begin + 0.6 * remaining_seconds
            )
        orders.append((problem, problem.split(rank_orders)))
        problem, rank_orders = min(
            orders, key=lambda order: (not _fits(*order), order[0].period(order[1]))
        )
        bound = problem.bound()
        use_exact = use_exact and (problem.n_ops <= _EXACT_OPS or exact is True)
        remaining_seconds = end - time.monotonic()
        rank_orders = self.places(
            problem, rank_orders, end - (0.7 * remaining_seconds if use_exact else 0.0), bound
        )
        if use_exact and problem.period(rank_orders) > bound * (1 + _TIE):
            rank_orders, proven_bound = self.solved(problem, rank_orders, end)
            bound = max(bound, proven_bound)
        return problem, rank_orders, bound

    def solved(
        self, problem: OrderProblem, words: list[Word], end: float
    ) -> tuple[list[Word], float]:
        """Return ``words`` or better orders, and a bound, by OR-tools."""
        seconds = max(1.0, end - time.monotonic())
        exact_orders, bound = _exact.solve(problem, words, seconds, self.report)
        is_better = _fits(problem, exact_orders) or not _fits(problem, words)
        return exact_orders if is_better else words, bound

    def listed(self, block: _Block) -> list[Word]:
        """List the orders of merged stages from the keys of a block.

        Forwards take the key of a group's first stage, backwards that of its last.
        """
        problem, (interval, patience, *keys) = self.make(block[0]), block[1]
        n_kinds = len(problem.kinds)
        group_keys = [
            keys[group[0 if kind == 0 else -1] * n_kinds + kind]
            for group in problem.groups
            for kind in range(n_kinds)
        ]
        return list_schedule(problem.merged, [interval, patience, *group_keys])

    def seconds(self, block: _Block) -> float:
        """Return the seconds of a training step; infinite if a rank has no room."""
        try:
            problem = self.make(block[0]).merged
        except UserError:
            return inf
        return problem.period(self.listed(block))

    def blocks(self, block: _Block, free: bool, end: float, bound: float) -> _Block:
        """Anneal keys, and ranks of stages if they are free."""
        draw, longest = self.draw, max(self.make(block[0]).seconds)

        def change(block: _Block) -> _Block:
            stage_ranks, (interval, patience, *keys) = [*block[0]], block[1]
            if free and draw.random() < 0.5:
                stage, other_stage = (
                    draw.randrange(len(stage_ranks)),
                    draw.randrange(len(stage_ranks)),
                )
                if draw.random() < 0.7 and stage_ranks.count(stage_ranks[stage]) > 1:
                    neighbours = (max(stage - 1, 0), min(stage + 1, len(stage_ranks) - 1))
                    stage_ranks[stage] = stage_ranks[draw.choice((other_stage, *neighbours))]
                else:
                    stage_ranks[stage], stage_ranks[other_stage] = (
                        stage_ranks[other_stage],
                        stage_ranks[stage],
                    )
            else:
                deviation = interval * draw.choice((0.2, 1.0, 4.0))
                for _ in range(draw.choice((1, 1, 2, 4))):
                    keys[draw.randrange(len(keys))] += draw.gauss(0, deviation)
                if draw.random() < 0.2:
                    interval *= exp(draw.gauss(0, 0.2))
                if draw.random() < 0.2:
                    patience = draw.choice((0.0, draw.random())) * longest
            return tuple(stage_ranks), (interval, patience, *keys)

        def fits(block: _Block) -> bool:
            return _fits(self.make(block[0]).merged, self.listed(block))

        return self.anneal(block, change, self.seconds, fits, end, bound)

    def places(
        self, problem: OrderProblem, words: list[Word], end: float, bound: float
    ) -> list[Word]:
        """Anneal single places of ops in the orders."""
        draw = self.draw

        def change(rank_orders: list[Word]) -> list[Word]:
            rank = draw.randrange(len(rank_orders))
            rank_order = [*rank_orders[rank]]
            position = draw.randrange(len(rank_order))
            new_position = position + draw.choice((-1, 1)) * int(1 + draw.expovariate(0.4))
            rank_order.insert(
                min(max(new_position, 0), len(rank_order) - 1), rank_order.pop(position)
            )
            if not problem.fits(rank, rank_order):
                return rank_orders
            return [*rank_orders[:rank], rank_order, *rank_orders[rank + 1 :]]

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
        """Return the best of many changes, until ``end`` or the ``bound``.

        Early on, slower changes are accepted too, so that the search leaves local minima.
        """
        current = best = given
        current_seconds = seconds(given)
        best_seconds = current_seconds if fits(given) else inf
        begin = clock = time.monotonic()
        hot, cold = _HEAT
        while clock < end and best_seconds > bound * (1 + _TIE):
            heat = hot * (cold / hot) ** ((clock - begin) / (end - begin)) * current_seconds
            clock = time.monotonic()
            changed = change(current)
            if changed is current:
                continue
            self.tried += 1
            changed_seconds = seconds(changed)
            if changed_seconds <= current_seconds or self.draw.random() < exp(
                (current_seconds - changed_seconds) / heat
            ):
                current = changed
                current_seconds = changed_seconds
                if current_seconds < best_seconds and fits(current):
                    best = current
                    best_seconds = current_seconds
            self.report("annealing", best_seconds, bound)
        return best

    def report(self, what: str, seconds: float, bound: float) -> None:
        """Call ``progress``, at most once a second."""
        if self.say and (clock := time.monotonic()) - self.said > 1:
            self.said = clock
            self.say(what, seconds, bound)


def _catalogued(problem: OrderProblem) -> Iterator[list[Word]]:
    """Yield the catalogue's orders that have this placement and fit into the room."""
    n_stages = len(problem.held)
    for method in catalog.METHODS.values():
        if method.kind != "pipeline":
            continue
        options = {"n_ranks": problem.n_ranks} if "n_ranks" in method.options else {}
        try:
            schedule = method(n_stages, problem.n_microbatches, **options)
        except UserError:  # these sizes do not suit it
            continue
        rank_rows = zip(*schedule.layout.cycles, strict=True)  # of each micro-batch
        kinds = {op.kind for op in schedule.timing.starts}  # some pipelines split few backwards
        fits_problem = {*rank_rows} == {problem.placement} and kinds == {*problem.kinds}
        if fits_problem and not schedule.max_staleness:
            rank_orders = problem.words(schedule)
            if all(map(problem.fits, range(problem.n_ranks), rank_orders)):
                yield rank_orders

"""Annealing of rank orders: random changes; a faster order stays.

The search has two stages. A block is a placement and the keys of list scheduling: a change of it
moves many ops at once. Then single ops change their places in the orders.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import exp, inf
from typing import TypeVar

from toolkit.errors import UserError
from toolkit.plan import exact as exact_solver
from toolkit.plan.list_schedule import simple_keys
from toolkit.plan.order_bound import step_bound
from toolkit.plan.order_problem import OrderProblem, RankOrder
from toolkit.plan.search_space import OnSearch, SearchSpace
from toolkit.plan.stage_groups import StageGroups
from toolkit.plan.stage_placement import Places
from toolkit.schedule import catalog

TIE = 1e-9
"""Relative difference of sums of seconds, or bytes, that are equal."""

_T = TypeVar("_T")
_Block = tuple[Places, tuple[float, ...]]
"""A placement, and the keys of :func:`list_schedule`."""

_HEAT = 0.02, 2e-4  # of annealing, first and last, relative to a step


class OrderAnnealing:
    """A search for orders in a room that may be less than the limits.

    Attributes:
        n_tried: orders that were timed.
    """

    def __init__(
        self,
        space: SearchSpace,
        room: Sequence[float],
        draw: random.Random,
        progress: OnSearch | None,
    ) -> None:
        self.n_tried = 0
        self._space = space
        self._draw = draw
        self._progress = progress
        self._last_report = time.monotonic()
        room_of_attempt = tuple(room)

        # The room is the same in the whole attempt, so a placement alone names its problem.
        @lru_cache(1000)
        def groups_of(placement: Places) -> StageGroups:
            return StageGroups(space.problem(placement, room_of_attempt))

        self._groups_of = groups_of

    def best(
        self,
        placements: Sequence[Places],
        end: float,
        exact: bool | None,
        catalogue: bool,
    ) -> tuple[OrderProblem, list[RankOrder], float]:
        """Return the best orders, their problem, and a bound on the seconds of a step.

        Args:
            placements: those to begin with.
            end: time at which the search ends, by :func:`time.monotonic`.
            exact: as in :func:`toolkit.plan.search`.
            catalogue: as in :func:`toolkit.plan.search`.

        Raises:
            UserError: on each placement a rank has no room for one micro-batch.
        """
        # How the time is shared, with and without OR-tools:
        #
        #     |catalogue, keys, blocks|merged stages | places |  all stages   |
        #     0                      0.3            0.6      0.72             1
        #     |catalogue, keys, blocks         |           places             |
        #     0                               0.5                             1
        use_exact = _solver_is_used(exact)
        begin = time.monotonic()
        seconds_left = end - begin
        problems = self._problems(placements)
        candidates = []
        if catalogue:
            candidates = _catalogue_orders(problems, begin + 0.25 * seconds_left)
        block = self._first_block(problems, begin + 0.3 * seconds_left)
        bound = 0.0
        if not self._space.placement_is_free:
            bound = step_bound(self._groups_of(block[0]).problem)

        # 1. Keys and placements.
        block_share = 0.3 if use_exact else 0.5
        block = self._anneal_block(block, begin + block_share * seconds_left, bound)

        # 2. OR-tools on merged stages.
        solver_end = begin + 0.6 * seconds_left
        candidates.append(self._orders_of_block(block, use_exact, solver_end))
        problem, orders = min(candidates, key=_order_merit)

        # 3. Single places of ops.
        bound = step_bound(problem)
        seconds_left = end - time.monotonic()
        is_worthwhile = exact_solver.is_small(problem) and seconds_left > 0
        use_exact = use_exact and (exact is True or is_worthwhile)
        exact_seconds = 0.7 * seconds_left if use_exact else 0.0
        orders = self._anneal_places(problem, orders, end - exact_seconds, bound)

        # 4. OR-tools on all stages.
        if use_exact and problem.period(orders) > bound * (1 + TIE):
            orders, proven_bound = self._solve(problem, orders, end)
            bound = max(bound, proven_bound)
        return problem, orders, bound

    def _problems(self, placements: Sequence[Places]) -> dict[Places, OrderProblem]:
        """Return the problem of each placement on which ranks have room for a micro-batch."""
        problems = {}
        for placement in placements:
            try:
                problems[placement] = self._groups_of(placement).problem
            except UserError as error:  # a rank has no room
                room_error = error
        if not problems:
            raise room_error
        return problems

    def _first_block(
        self, problems: Mapping[Places, OrderProblem], end: float
    ) -> _Block:
        """Return the fastest block of simple keys, of those that can be timed until ``end``."""
        best_block: _Block | None = None
        least_seconds = inf
        for placement, problem in problems.items():
            for keys in simple_keys(problem):
                if best_block is not None and time.monotonic() > end:
                    return best_block
                block_seconds = self._block_seconds((placement, keys))
                if best_block is None or block_seconds < least_seconds:
                    best_block = (placement, keys)
                    least_seconds = block_seconds
        assert best_block is not None
        return best_block

    def _orders_of_block(
        self, block: _Block, use_exact: bool, solver_end: float
    ) -> tuple[OrderProblem, list[RankOrder]]:
        """Return the orders of all stages that a block stands for, and their problem.

        If neighbours were merged, OR-tools improves the orders of the merged stages first.
        """
        placement, keys = block
        groups = self._groups_of(placement)
        orders = groups.list_orders(keys)
        is_merged = groups.merged is not groups.problem
        if use_exact and is_merged and exact_solver.is_small(groups.merged):
            orders, _ = self._solve(groups.merged, orders, solver_end)
        return groups.problem, groups.split(orders)

    def _block_seconds(self, block: _Block) -> float:
        """Return the seconds of a training step; infinite if a rank has no room."""
        placement, keys = block
        try:
            groups = self._groups_of(placement)
        except UserError:
            return inf
        return groups.merged.period(groups.list_orders(keys))

    def _block_fits(self, block: _Block) -> bool:
        placement, keys = block
        groups = self._groups_of(placement)
        return _fits(groups.merged, groups.list_orders(keys))

    def _solve(
        self, problem: OrderProblem, orders: list[RankOrder], end: float
    ) -> tuple[list[RankOrder], float]:
        """Return ``orders`` or better ones, and a bound, by OR-tools."""
        seconds = end - time.monotonic()
        exact_orders, bound = exact_solver.solve(problem, orders, seconds, self._report)
        # The solver rounds bytes down, so its orders may exceed a room. They then replace only
        # orders that exceed one, too.
        is_better = _fits(problem, exact_orders) or not _fits(problem, orders)
        if is_better:
            orders = exact_orders
        return orders, bound

    def _anneal_block(self, block: _Block, end: float, bound: float) -> _Block:
        """Anneal keys, and ranks of stages if they are free."""
        placement_is_free = self._space.placement_is_free
        longest_op = max(self._groups_of(block[0]).problem.seconds)

        def change(block: _Block) -> _Block:
            placement, keys = block
            if placement_is_free and self._draw.random() < 0.5:
                return self._changed_placement(placement), keys
            return placement, self._changed_keys(keys, longest_op)

        return self._anneal(
            block, change, self._block_seconds, self._block_fits, end, bound
        )

    def _changed_placement(self, placement: Places) -> Places:
        """Move a stage to the rank of another one or of a neighbour, or exchange two stages."""
        draw = self._draw
        stage_ranks = [*placement]
        n_stages = len(stage_ranks)
        stage = draw.randrange(n_stages)
        other_stage = draw.randrange(n_stages)
        # The rank of the moved stage needs another one.
        if draw.random() < 0.7 and stage_ranks.count(stage_ranks[stage]) > 1:
            # Neighbours are likelier than others: on one rank they need no message.
            neighbours = (max(stage - 1, 0), min(stage + 1, n_stages - 1))
            stage_ranks[stage] = stage_ranks[draw.choice((other_stage, *neighbours))]
        else:
            stage_ranks[stage] = placement[other_stage]
            stage_ranks[other_stage] = placement[stage]
        return tuple(stage_ranks)

    def _changed_keys(
        self, keys: Sequence[float], longest_op: float
    ) -> tuple[float, ...]:
        draw = self._draw
        interval, patience, *chain_keys = keys
        # Small changes refine an order, large ones leave a local minimum.
        deviation = interval * draw.choice((0.2, 1.0, 4.0))
        for _ in range(draw.choice((1, 1, 2, 4))):
            chain_keys[draw.randrange(len(chain_keys))] += draw.gauss(0, deviation)
        if draw.random() < 0.2:
            interval *= exp(draw.gauss(0, 0.2))
        if draw.random() < 0.2:
            patience = draw.choice((0.0, draw.random())) * longest_op
        return (interval, patience, *chain_keys)

    def _anneal_places(
        self, problem: OrderProblem, orders: list[RankOrder], end: float, bound: float
    ) -> list[RankOrder]:
        """Anneal single places of ops in the orders."""
        draw = self._draw

        def change(orders: list[RankOrder]) -> list[RankOrder]:
            rank = draw.randrange(len(orders))
            order = [*orders[rank]]
            position = draw.randrange(len(order))
            # Mostly to a near place: 2.5 places away on average.
            new_position = position + draw.choice((-1, 1)) * int(
                1 + draw.expovariate(0.4)
            )
            new_position = min(max(new_position, 0), len(order) - 1)
            order.insert(new_position, order.pop(position))
            if not problem.fits(rank, order):
                return orders
            return [*orders[:rank], order, *orders[rank + 1 :]]

        def fits(orders: list[RankOrder]) -> bool:
            return _fits(problem, orders)

        return self._anneal(orders, change, problem.period, fits, end, bound)

    def _anneal(
        self,
        first: _T,
        change: Callable[[_T], _T],
        seconds_of: Callable[[_T], float],
        fits: Callable[[_T], bool],
        end: float,
        bound: float,
    ) -> _T:
        """Return the best of many changes, until ``end`` or the ``bound``.

        Early on, slower changes are accepted too, so that the search leaves local minima.
        """
        current = best = first
        current_seconds = seconds_of(first)
        best_seconds = current_seconds if fits(first) else inf
        begin = now = time.monotonic()
        hot, cold = _HEAT
        while now < end and best_seconds > bound * (1 + TIE):
            # It falls by the same factor in equal times, from 2 % of a step to 0.02 %. A change
            # that is slower by just the heat is accepted with a chance of exp(-1), 37 %.
            heat = (
                hot * (cold / hot) ** ((now - begin) / (end - begin)) * current_seconds
            )
            now = time.monotonic()
            changed = change(current)
            # Orders that a rank has no room for come back unchanged. They are not timed again.
            if changed is current:
                continue
            self.n_tried += 1
            changed_seconds = seconds_of(changed)
            # The chance to accept a slower change falls with the heat.
            if changed_seconds <= current_seconds or self._draw.random() < exp(
                (current_seconds - changed_seconds) / heat
            ):
                current = changed
                current_seconds = changed_seconds
                # Peaks take a second simulation, so only orders that would be the best need them.
                if current_seconds < best_seconds and fits(current):
                    best = current
                    best_seconds = current_seconds
            self._report("annealing", best_seconds, bound)
        return best

    def _report(self, activity: str, seconds: float, bound: float) -> None:
        """Call ``progress``, at most once a second."""
        if self._progress is None:
            return
        now = time.monotonic()
        if now - self._last_report > 1:
            self._last_report = now
            self._progress(activity, seconds, bound)


def _solver_is_used(exact: bool | None) -> bool:
    """Return whether OR-tools takes part, and import it if so."""
    is_used = exact_solver.available() if exact is None else exact
    if is_used:
        # Its import takes seconds on a busy machine: the rest of the search then has fewer.
        exact_solver.cp_model()
    return is_used


def _fits(problem: OrderProblem, orders: list[RankOrder]) -> bool:
    """Whether ranks have room for activations and for messages that wait."""
    peaks = problem.peaks(orders)
    return all(
        peak <= room * (1 + TIE) for peak, room in zip(peaks, problem.room, strict=True)
    )


def _order_merit(candidate: tuple[OrderProblem, list[RankOrder]]) -> tuple:
    """Return the sort key of a problem and its orders: those that fit first, then the fastest."""
    problem, orders = candidate
    return not _fits(problem, orders), problem.period(orders)


def _catalogue_orders(
    problems: Mapping[Places, OrderProblem], end: float
) -> list[tuple[OrderProblem, list[RankOrder]]]:
    """Return the catalogue's orders that fit into the room of one of the ``problems``.

    No further method is looked at after ``end``.
    """
    candidates = []
    any_problem = next(iter(problems.values()))
    for method in catalog.METHODS.values():
        if time.monotonic() > end:
            break
        if method.kind != "pipeline":
            continue
        options = {}
        if "n_ranks" in method.options:
            options = {"n_ranks": any_problem.n_ranks}
        try:
            schedule = method(
                any_problem.n_stages, any_problem.n_microbatches, **options
            )
        except UserError:  # these sizes do not suit it
            continue
        placements = {*zip(*schedule.layout.cycles, strict=True)}  # of each micro-batch
        # Some pipelines split few backwards.
        kinds = {op.kind for op in schedule.timing.starts}
        # A problem is a flush with one placement for all micro-batches, and its kinds of ops.
        if (
            schedule.max_staleness
            or len(placements) != 1
            or kinds != {*any_problem.kinds}
        ):
            continue
        problem = problems.get(placements.pop())
        if problem is not None:
            orders = problem.orders_of(schedule)
            if all(map(problem.fits, range(problem.n_ranks), orders)):
                candidates.append((problem, orders))
    return candidates

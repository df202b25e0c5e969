"""Least training steps of small problems, by OR-tools' CP-SAT: a proof, or a bound.

Starts are whole ticks; a training step takes a period, in which each rank runs its ops. Seconds are
rounded down to ticks, so that the bound holds; there is no rounding if all are multiples of a tick.
"""

import itertools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from math import floor, inf, isfinite
from typing import Any

from toolkit.errors import UserError
from toolkit.plan.order_bound import step_bound
from toolkit.plan.order_problem import OrderProblem, RankOrder
from toolkit.plan.search_space import OnSearch

_MAX_WORKERS = 8  # threads of the solver
_SMALL = 1000  # ops of a training step
_LEAST_SECONDS = 0.1  # of the solver, though none are left
_LEVELS = 10**6  # of a rank's room, where bytes are rounded


def available() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def is_small(problem: OrderProblem) -> bool:
    """Whether OR-tools is asked by default."""
    return problem.n_ops <= _SMALL


def solve(
    problem: OrderProblem,
    orders: list[RankOrder],
    seconds: float,
    report: OnSearch | None = None,
) -> tuple[list[RankOrder], float]:
    """Improve orders until they are proven to be the fastest, or ``seconds`` have passed.

    Args:
        problem: the problem.
        orders: ``[rank]``, to begin with.
        seconds: limit of the solver.
        report: called with the activity, the seconds of a step with ``orders``, and the bound.

    Returns:
        The best orders, ``orders`` or better, and seconds that none falls below.

    Raises:
        UserError: OR-tools is not installed.
    """
    end = time.monotonic() + seconds
    model = _Model(problem)
    model.cp.minimize(model.period)
    first_seconds = problem.period(orders)
    for chain_starts, variables in zip(
        problem.starts(orders), model.starts, strict=True
    ):
        # The orders so far are a hint, so that the solver has a solution at once and looks for
        # better ones.
        for start, variable in zip(chain_starts, variables, strict=True):
            model.cp.add_hint(variable, floor(start / problem.tick))
    solver = _solver(end)
    if report:
        # The solver runs in C++ and calls back whenever its bound rises.
        solver.best_bound_callback = lambda bound: report(
            "proving", first_seconds, bound * problem.tick
        )
    if solver.status_name(solver.solve(model.cp)) in ("OPTIMAL", "FEASIBLE"):
        # In ticks, orders may look faster than they are: seconds decide whether they replace these.
        orders = min(orders, model.orders(solver.value), key=problem.period)
    return orders, solver.best_objective_bound * problem.tick


def conflict(
    problem: OrderProblem, step_seconds: float, seconds: float
) -> tuple[int, ...] | None:
    """Find the fewest ranks whose rooms no orders keep to in steps of ``step_seconds``.

    Args:
        problem: the problem.
        step_seconds: longest training step that is allowed.
        seconds: limit of the search.

    Returns:
        The ranks; empty if no orders are so fast in any room; None if that is not proven within
        ``seconds``. Sets that are undecided by then are passed over.

    Raises:
        UserError: OR-tools is not installed.
    """
    cp_model()  # raises before any bound decides
    end = time.monotonic() + seconds
    limited_ranks = [rank for rank, room in enumerate(problem.room) if isfinite(room)]
    # Only if all limits together exclude such orders can some of them do so. This first proof gets
    # half of the time, since it often shows that there is nothing to find.
    if not _is_impossible(problem, limited_ranks, step_seconds, seconds / 2):
        return None
    # Small sets come first, so the first that is proven impossible has the fewest ranks.
    for size in range(len(limited_ranks)):
        for ranks in combinations(limited_ranks, size):
            seconds_left = end - time.monotonic()
            if seconds_left > 0 and _is_impossible(
                problem, ranks, step_seconds, seconds_left / 2
            ):
                return ranks
    return tuple(limited_ranks)


def _is_impossible(
    problem: OrderProblem, ranks: Sequence[int], step_seconds: float, seconds: float
) -> bool:
    """Whether it is proven that no orders are so fast if only ``ranks`` have limited room."""
    room = [
        room_bytes if rank in ranks else inf
        for rank, room_bytes in enumerate(problem.room)
    ]
    relaxed_problem = replace(problem, room=tuple(room))
    # The bound of the loads is free; the solver takes seconds. Equal seconds may differ by
    # rounding.
    if step_bound(relaxed_problem) > step_seconds * (1 + 1e-9):
        return True
    end = time.monotonic() + seconds
    model = _Model(relaxed_problem)
    # Ticks are rounded down, so that a proof in ticks holds in seconds.
    model.cp.add(model.period <= floor(step_seconds / relaxed_problem.tick + 1e-6))
    solver = _solver(end)
    return bool(solver.status_name(solver.solve(model.cp)) == "INFEASIBLE")


def cp_model() -> Any:
    """Import OR-tools' module of models; raises UserError if it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UserError(
            "exact=True needs OR-tools: pip install 'cyclic-dp[search]', or leave it out"
        ) from error
    return cp_model


def _solver(end: float) -> Any:
    """Return a solver that stops at ``end``, by :func:`time.monotonic`."""
    solver = cp_model().CpSolver()
    solver.parameters.max_time_in_seconds = max(_LEAST_SECONDS, end - time.monotonic())
    # Of more threads than cores some would exceed the limit by seconds, since they look rarely.
    solver.parameters.num_workers = min(_MAX_WORKERS, os.cpu_count() or 1)
    return solver


class _Model:
    """Constraints on the starts of a training step's ops.

    Attributes:
        cp: OR-tools' model.
        starts: its variables, ``[chain][microbatch]``, in ticks.
        period: its variable, the ticks of a training step.
    """

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self.cp = cp_model().CpModel()
        n_microbatches = problem.n_microbatches
        self.op_ticks = [self.ticks(seconds) for seconds in problem.seconds]
        update_ticks = [self.ticks(seconds) for seconds in problem.update_seconds]
        lags = [
            self.ticks(lag) for _, lag in itertools.chain.from_iterable(problem.needs)
        ]
        # The longest row of ops: all of them in turn.
        self.horizon = n_microbatches * (sum(self.op_ticks) + sum(lags)) + sum(
            update_ticks
        )
        # 1. Variables: the start of every op in the first training step, and the period.
        self.starts: list[list[Any]] = []
        for _ in self.op_ticks:
            self.starts.append([self.variable() for _ in range(n_microbatches)])
        self.period = self.cp.new_int_var(
            self.ticks(step_bound(problem)), self.horizon, "period"
        )
        # Every op follows this one, directly or not, so no solution is lost if it starts at 0.
        self.cp.add(self.starts[0][0] == 0)
        # 2. The order of the ops of a micro-batch, and of micro-batches in a chain.
        for chain, chain_needs in enumerate(problem.needs):
            # Micro-batches are alike, so each chain runs them in order. That removes equivalent
            # solutions.
            for previous_start, start in itertools.pairwise(self.starts[chain]):
                self.cp.add(start >= previous_start + self.op_ticks[chain])
            for needed_chain, lag in chain_needs:
                for needed_start, start in zip(
                    self.starts[needed_chain], self.starts[chain], strict=True
                ):
                    arrival = (
                        needed_start + self.op_ticks[needed_chain] + self.ticks(lag)
                    )
                    self.cp.add(start >= arrival)
        # 3. Each rank runs one op at a time, ends a step before it begins the next, and keeps to
        # its room.
        for rank, chains in enumerate(problem.chains_of_rank):
            spans = {chain: self.spans(chain) for chain in chains}
            self.cp.add_no_overlap([*itertools.chain.from_iterable(spans.values())])
            for stage in problem.stages_of_rank[rank]:
                self.end_within_period(rank, stage, update_ticks[stage])
            if isfinite(problem.room[rank]):
                self.limit_memory(rank, spans)

    def ticks(self, seconds: float) -> int:
        """Return whole ticks, rounded down."""
        return floor(seconds / self.problem.tick + 1e-6)

    def variable(self) -> Any:
        """Return a new variable in ticks."""
        return self.cp.new_int_var(0, self.horizon, "")

    def spans(self, chain: int) -> list[Any]:
        """Return an interval for each op of ``chain``."""
        return [
            self.cp.new_fixed_size_interval_var(start, self.op_ticks[chain], "")
            for start in self.starts[chain]
        ]

    def end_within_period(self, rank: int, stage: int, update_ticks: int) -> None:
        """Let the ops of a stage end before its rank, and its weights, begin the next step."""
        # A rank's first op is the first forward of its first stage.
        # The steps of a rank repeat after a period, those of other ranks are shifted in time:
        #
        #     rank 0   |F F B B . .|F F B B . .|        a rank's ops are within its own period,
        #     rank 1       |F B F B . .|F B F B         not within that of the first rank
        rank_start = self.starts[self.problem.chains_of_rank[rank][0]][0]
        chains = self.problem.chains(stage)
        for chain in chains:
            end = self.starts[chain][-1] + self.op_ticks[chain]
            self.cp.add(end <= rank_start + self.period)
        # `end` is now that of the stage's last backward.
        self.cp.add(end + update_ticks <= self.starts[chains[0]][0] + self.period)

    def limit_memory(self, rank: int, spans: dict[int, list[Any]]) -> None:
        """Keep a rank to its room: workspace, waiting messages and activations are intervals."""
        problem = self.problem
        room = problem.room[rank]
        # Each amount of bytes takes room for an interval of time:
        #
        #     message waits   arrival |=====|
        #     workspace                     |F|            |B|
        #     activations                   |================|     from F's start to the end of B
        byte_counts = [
            *problem.kept_bytes,
            *problem.workspace_bytes,
            *problem.waiting_bytes,
            room,
        ]
        has_whole_bytes = all(
            amount == floor(amount) <= _LEVELS for amount in byte_counts
        )
        # Amounts are rounded down: what does not fit here does not fit in truth, either.
        bytes_per_level = room / _LEVELS
        if has_whole_bytes:
            bytes_per_level = 1.0
        intervals: list[Any] = []
        levels: list[int] = []
        for chain, chain_spans in spans.items():
            starts = self.starts[chain]
            level = floor(problem.workspace_bytes[chain] / bytes_per_level)
            if level:
                intervals += chain_spans
                levels += [level] * len(chain_spans)
            level = floor(problem.waiting_bytes[chain] / bytes_per_level)
            if level:
                sender, lag = problem.needs[chain][-1]
                message_ticks = self.op_ticks[sender] + self.ticks(lag)
                arrivals = [start + message_ticks for start in self.starts[sender]]
                intervals += self.intervals(arrivals, starts)
                levels += [level] * len(starts)
            stage, kind = divmod(chain, problem.n_kinds)
            level = floor(problem.kept_bytes[stage] / bytes_per_level)
            if kind == 0 and level:
                last_chain = problem.chains(stage)[-1]
                ends = [
                    start + self.op_ticks[last_chain]
                    for start in self.starts[last_chain]
                ]
                intervals += self.intervals(starts, ends)
                levels += [level] * len(starts)
        self.cp.add_cumulative(intervals, levels, floor(room / bytes_per_level))

    def intervals(self, starts: Sequence[Any], ends: Sequence[Any]) -> list[Any]:
        """Return intervals from each start to its end."""
        return [
            self.cp.new_interval_var(start, self.variable(), end, "")
            for start, end in zip(starts, ends, strict=True)
        ]

    def orders(self, value: Callable[[Any], int]) -> list[RankOrder]:
        """Return a solution's rank orders; of ops that start together, the first kind first."""
        orders = []
        for chains in self.problem.chains_of_rank:
            timed_chains = []
            for chain in chains:
                kind = chain % self.problem.n_kinds
                timed_chains += [
                    (value(start), kind, chain) for start in self.starts[chain]
                ]
            orders.append([chain for *_, chain in sorted(timed_chains)])
        return orders

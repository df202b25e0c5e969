"""The fastest rank orders of small problems, by OR-tools' CP-SAT: a proof, or a bound.

Starts are whole ticks; a training step takes a period, in which each rank runs its ops. Seconds are
rounded down to ticks, so that the bound holds; there is no rounding if all are multiples of a tick.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations, pairwise
from math import floor, inf, isfinite
from typing import Any

from toolkit.errors import UserError
from toolkit.plan.order_problem import OrderProblem, Word

_LEVELS = 10**6  # of a rank's room, where bytes are rounded


def available() -> bool:
    """Whether OR-tools is installed."""
    return find_spec("ortools") is not None


def solve(
    problem: OrderProblem,
    words: list[Word],
    seconds: float,
    report: Callable[[str, float, float], None] | None = None,
    workers: int = 8,
) -> tuple[list[Word], float]:
    """Improve orders until they are proven to be the fastest, or ``seconds`` have passed.

    Returns:
        The best orders, ``words`` or better, and seconds that none falls below.

    Raises:
        UserError: OR-tools is not installed.
    """
    cp = cp_model()
    tick = problem.tick()
    model, starts, period = _model(cp, problem, tick)
    model.minimize(period)
    least = problem.period(words)
    for times, variables in zip(problem.starts(words), starts, strict=True):
        for at, variable in zip(times, variables, strict=True):
            model.add_hint(variable, floor(at / tick))
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    if report:
        solver.best_bound_callback = lambda bound: report("proving", least, bound * tick)
    status = solver.solve(model)
    if status in (cp.OPTIMAL, cp.FEASIBLE):
        words = min(words, _words(problem, starts, solver.value), key=problem.period)
    return words, solver.best_objective_bound * tick


def conflict(problem: OrderProblem, step_seconds: float, seconds: float) -> tuple[int, ...] | None:
    """Ranks whose rooms no orders keep to in steps of ``step_seconds``: as few as possible.

    Returns:
        The ranks; empty if no orders are so fast in any room; None if that is not proven within
        ``seconds``. Sets that are undecided by then are passed over.

    Raises:
        UserError: OR-tools is not installed.
    """
    cp, end = cp_model(), time.monotonic() + seconds
    limited = [rank for rank, room in enumerate(problem.room) if isfinite(room)]

    def impossible(ranks: Sequence[int], seconds: float) -> bool:
        room = [x if rank in ranks else inf for rank, x in enumerate(problem.room)]
        relaxed = replace(problem, room=tuple(room))
        if relaxed.bound() > step_seconds * (1 + 1e-9):
            return True
        tick = relaxed.tick()
        model, _, period = _model(cp, relaxed, tick)
        model.add(period <= floor(step_seconds / tick + 1e-6))
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, seconds)
        solver.parameters.num_workers = 8
        return solver.solve(model) == cp.INFEASIBLE

    if not impossible(limited, seconds / 2):
        return None
    for size in range(len(limited)):
        for ranks in combinations(limited, size):
            if (left := end - time.monotonic()) > 0 and impossible(ranks, left / 2):
                return ranks
    return tuple(limited)


def cp_model() -> Any:
    """OR-tools' module of models; raises UserError if it is not installed."""
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise UserError(
            "exact=True needs OR-tools: pip install 'cyclic-dp[search]', or leave it out"
        ) from error
    return cp_model


def _words(
    problem: OrderProblem, starts: list[list[Any]], value: Callable[[Any], int]
) -> list[Word]:
    n = len(problem.kinds)
    return [
        [c for *_, c in sorted((value(v), c % n, c) for c in chains for v in starts[c])]
        for chains in problem.of_rank
    ]


def _model(cp: Any, problem: OrderProblem, tick: float) -> tuple[Any, list[list[Any]], Any]:
    """The model, its starts ``[chain][microbatch]`` and its period."""
    model = cp.CpModel()
    n, m = len(problem.kinds), problem.n_microbatches

    def ticks(x: float) -> int:
        return floor(x / tick + 1e-6)

    took = [ticks(x) for x in problem.seconds]
    lags = [ticks(lag) for needed in problem.needs for _, lag in needed]
    updates = [ticks(x) for x in problem.updates]
    horizon = m * (sum(took) + sum(lags)) + sum(updates)  # of the longest row of ops
    starts = [[model.new_int_var(0, horizon, "") for _ in range(m)] for _ in took]
    period = model.new_int_var(ticks(problem.bound()), horizon, "period")
    model.add(starts[0][0] == 0)
    for c, needed in enumerate(problem.needs):
        for before, after in pairwise(starts[c]):
            model.add(after >= before + took[c])
        for d, lag in needed:
            for before, after in zip(starts[d], starts[c], strict=True):
                model.add(after >= before + took[d] + ticks(lag))
    for rank, chains in enumerate(problem.of_rank):
        spans = {
            c: [model.new_fixed_size_interval_var(v, took[c], "") for v in starts[c]]
            for c in chains
        }
        model.add_no_overlap([span for of_chain in spans.values() for span in of_chain])
        for c in chains:
            end = starts[c][-1] + took[c]
            model.add(end <= starts[chains[0]][0] + period)
            if c % n == n - 1:
                model.add(end + updates[c // n] <= starts[c - n + 1][0] + period)
        if isfinite(problem.room[rank]):
            _limit(model, problem, rank, starts, spans, took, horizon, tick)
    return model, starts, period


def _limit(
    model: Any,
    problem: OrderProblem,
    rank: int,
    starts: list[list[Any]],
    spans: dict[int, list[Any]],
    took: list[int],
    horizon: int,
    tick: float,
) -> None:
    """Keep to the rank's room."""
    n, room = len(problem.kinds), problem.room[rank]
    sizes = [*problem.held, *problem.work, *problem.waiting, room]
    exact = all(x == floor(x) <= _LEVELS for x in sizes)
    level = 1.0 if exact else room / _LEVELS
    intervals, bytes_of = [], []
    for c, of_chain in spans.items():
        if work := floor(problem.work[c] / level):
            intervals += of_chain
            bytes_of += [work] * len(of_chain)
        if waiting := floor(problem.waiting[c] / level):
            d, lag = problem.needs[c][-1]
            for made, begin in zip(starts[d], starts[c], strict=True):
                arrived, length = (
                    made + took[d] + floor(lag / tick + 1e-6),
                    model.new_int_var(0, horizon, ""),
                )
                intervals.append(model.new_interval_var(arrived, length, begin, ""))
                bytes_of.append(waiting)
        if c % n == 0 and (held := floor(problem.held[c // n] / level)):
            last = c + n - 1
            for begin, end in zip(starts[c], starts[last], strict=True):
                length = model.new_int_var(0, horizon, "")
                intervals.append(model.new_interval_var(begin, length, end + took[last], ""))
                bytes_of.append(held)
    model.add_cumulative(intervals, bytes_of, floor(room / level))

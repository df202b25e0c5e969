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

    Args:
        problem: the problem.
        words: ``[rank]``, orders to begin with.
        seconds: limit of the solver.
        report: called with the activity, the seconds of a step with ``words``, and the bound.
        workers: threads of the solver.

    Returns:
        The best orders, ``words`` or better, and seconds that none falls below.

    Raises:
        UserError: OR-tools is not installed.
    """
    cp = cp_model()
    tick = problem.tick()
    model, starts, period = _model(cp, problem, tick)
    model.minimize(period)
    known_seconds = problem.period(words)
    for chain_starts, variables in zip(problem.starts(words), starts, strict=True):
        for start, variable in zip(chain_starts, variables, strict=True):
            model.add_hint(variable, floor(start / tick))
    solver = cp.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    if report:
        solver.best_bound_callback = lambda bound: report("proving", known_seconds, bound * tick)
    status = solver.solve(model)
    if status in (cp.OPTIMAL, cp.FEASIBLE):
        words = min(words, _words(problem, starts, solver.value), key=problem.period)
    return words, solver.best_objective_bound * tick


def conflict(problem: OrderProblem, step_seconds: float, seconds: float) -> tuple[int, ...] | None:
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
    cp, end = cp_model(), time.monotonic() + seconds
    limited = [rank for rank, room in enumerate(problem.room) if isfinite(room)]

    def impossible(ranks: Sequence[int], seconds: float) -> bool:
        room = [
            room_bytes if rank in ranks else inf for rank, room_bytes in enumerate(problem.room)
        ]
        relaxed_problem = replace(problem, room=tuple(room))
        if relaxed_problem.bound() > step_seconds * (1 + 1e-9):
            return True
        tick = relaxed_problem.tick()
        model, _, period = _model(cp, relaxed_problem, tick)
        model.add(period <= floor(step_seconds / tick + 1e-6))
        solver = cp.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.1, seconds)
        solver.parameters.num_workers = 8
        return solver.solve(model) == cp.INFEASIBLE

    if not impossible(limited, seconds / 2):
        return None
    for size in range(len(limited)):
        for ranks in combinations(limited, size):
            if (seconds_left := end - time.monotonic()) > 0 and impossible(ranks, seconds_left / 2):
                return ranks
    return tuple(limited)


def cp_model() -> Any:
    """Import OR-tools' module of models; raises UserError if it is not installed."""
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
    n_kinds = len(problem.kinds)
    return [
        [
            chain
            for *_, chain in sorted(
                (value(start), chain % n_kinds, chain)
                for chain in chains
                for start in starts[chain]
            )
        ]
        for chains in problem.of_rank
    ]


def _model(cp: Any, problem: OrderProblem, tick: float) -> tuple[Any, list[list[Any]], Any]:
    """Build the model; return it, its starts ``[chain][microbatch]`` and its period."""
    model = cp.CpModel()
    n_kinds, n_microbatches = len(problem.kinds), problem.n_microbatches

    def ticks(amount: float) -> int:
        return floor(amount / tick + 1e-6)

    op_ticks = [ticks(amount) for amount in problem.seconds]
    lags = [ticks(lag) for chain_needs in problem.needs for _, lag in chain_needs]
    update_ticks = [ticks(amount) for amount in problem.updates]
    # The longest row of ops: all of them in turn.
    horizon = n_microbatches * (sum(op_ticks) + sum(lags)) + sum(update_ticks)
    starts = [[model.new_int_var(0, horizon, "") for _ in range(n_microbatches)] for _ in op_ticks]
    period = model.new_int_var(ticks(problem.bound()), horizon, "period")
    model.add(starts[0][0] == 0)
    for chain, chain_needs in enumerate(problem.needs):
        for before, after in pairwise(starts[chain]):
            model.add(after >= before + op_ticks[chain])
        for needed_chain, lag in chain_needs:
            for before, after in zip(starts[needed_chain], starts[chain], strict=True):
                model.add(after >= before + op_ticks[needed_chain] + ticks(lag))
    for rank, chains in enumerate(problem.of_rank):
        spans = {
            chain: [
                model.new_fixed_size_interval_var(start, op_ticks[chain], "")
                for start in starts[chain]
            ]
            for chain in chains
        }
        model.add_no_overlap([span for chain_spans in spans.values() for span in chain_spans])
        for chain in chains:
            end = starts[chain][-1] + op_ticks[chain]
            model.add(end <= starts[chains[0]][0] + period)
            if chain % n_kinds == n_kinds - 1:
                model.add(
                    end + update_ticks[chain // n_kinds] <= starts[chain - n_kinds + 1][0] + period
                )
        if isfinite(problem.room[rank]):
            _limit(model, problem, rank, starts, spans, op_ticks, horizon, tick)
    return model, starts, period


def _limit(
    model: Any,
    problem: OrderProblem,
    rank: int,
    starts: list[list[Any]],
    spans: dict[int, list[Any]],
    op_ticks: list[int],
    horizon: int,
    tick: float,
) -> None:
    """Add the constraint that the rank keeps to its room.

    Workspace, messages that wait and activations each take an interval of bytes.
    """
    n_kinds, room = len(problem.kinds), problem.room[rank]
    byte_counts = [*problem.held, *problem.work, *problem.waiting, room]
    exact = all(amount == floor(amount) <= _LEVELS for amount in byte_counts)
    bytes_per_level = 1.0 if exact else room / _LEVELS
    intervals, interval_levels = [], []
    for chain, chain_spans in spans.items():
        if work_levels := floor(problem.work[chain] / bytes_per_level):
            intervals += chain_spans
            interval_levels += [work_levels] * len(chain_spans)
        if waiting_levels := floor(problem.waiting[chain] / bytes_per_level):
            needed_chain, lag = problem.needs[chain][-1]
            for sent, op_start in zip(starts[needed_chain], starts[chain], strict=True):
                arrival, length = (
                    sent + op_ticks[needed_chain] + floor(lag / tick + 1e-6),
                    model.new_int_var(0, horizon, ""),
                )
                intervals.append(model.new_interval_var(arrival, length, op_start, ""))
                interval_levels.append(waiting_levels)
        if chain % n_kinds == 0 and (
            held_levels := floor(problem.held[chain // n_kinds] / bytes_per_level)
        ):
            last_chain = chain + n_kinds - 1
            for op_start, backward_start in zip(starts[chain], starts[last_chain], strict=True):
                length = model.new_int_var(0, horizon, "")
                intervals.append(
                    model.new_interval_var(
                        op_start, length, backward_start + op_ticks[last_chain], ""
                    )
                )
                interval_levels.append(held_levels)
    model.add_cumulative(intervals, interval_levels, floor(room / bytes_per_level))

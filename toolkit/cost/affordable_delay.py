"""The least staleness that costs no time on given links.

With every weight one step late (CDP-v1) no rank waits for weights; with the freshest that the
timing allows (CDP-v2) it waits for each. Between them each stage and micro-batch may read the
freshest weights that arrive before they are needed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import inf

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs
from toolkit.errors import UserError
from toolkit.schedule import Schedule
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.staleness import Staleness, freshest
from toolkit.schedule.steady_state import steps_to_time


def affordable_delay(
    schedule: Schedule,
    costs: Costs,
    hardware: Hardware,
    *,
    within: float = 0.02,
    optimizer_bytes: Sequence[float] = (),
) -> Staleness:
    """Return the least staleness for which a simulated step is as fast as with late weights.

    Micro-batches of a stage that read its weights last after their update become fresh first. The
    search takes the least time, common to all stages, that weights may take to arrive; then, stage
    by stage, as many more fresh micro-batches as the limit allows. Each guess is simulated, about
    S log2(M) in all.

    Args:
        schedule: its timing, placement and chains are used, and its delay is not.
        costs: one entry per stage.
        hardware: seconds of messages, and of kernels that were not measured.
        within: share by which a step may take longer than with every weight one step late.
        optimizer_bytes: as in :func:`simulate`.

    Returns:
        ``[stage][microbatch]``, in steps, for ``delay`` of a :class:`Schedule`: between those of
        CDP-v2 and CDP-v1 if the timing is cyclic. On links that do not limit, that of CDP-v2.

    Raises:
        UserError: ``within`` is negative, or the schedule cannot be one step late.
    """
    if not (isinstance(within, int | float) and within >= 0):
        raise UserError(f"within is a share of a step, 0 or more: got {within!r}")
    late = tuple(tuple(max(steps, 1) for steps in row) for row in _least(schedule))
    slack = _slack(schedule)

    def delay(ticks: Sequence[float]) -> Staleness:
        """Fresh where ``ticks[stage]`` or more pass before weights are read."""
        return tuple(
            tuple(d if s >= t else steps for d, s, steps in zip(*rows, strict=True))
            for *rows, t in zip(_least(schedule), slack, late, ticks, strict=True)
        )

    @cache
    def seconds(delay: Staleness) -> float:
        try:
            guess = replace(schedule, delay=delay)
        except UserError:
            if delay == late:
                raise
            return inf  # rotated chains need time to go round
        program = guess.lower(steps_to_time(guess)).verify()
        return simulate(program, costs, hardware, optimizer_bytes).step_time

    limit = (1 + within) * seconds(late)

    def shortest(ticks: Sequence[Sequence[float]]) -> Sequence[float]:
        """The first of ``ticks`` that is affordable, if the last is and they are ordered."""
        found = bisect_left(
            ticks, True, key=lambda t: seconds(delay(t)) <= limit, hi=len(ticks) - 1
        )
        return ticks[found]

    every = sorted({ticks for row in slack for ticks in row})
    found = [*shortest([[ticks] * len(slack) for ticks in (*every, inf)])]
    for stage, row in enumerate(slack):
        fresher = [ticks for ticks in sorted({*row}) if ticks < found[stage]]
        tried = [[*found[:stage], ticks, *found[stage + 1 :]] for ticks in (*fresher, found[stage])]
        found = [*shortest(tried)]
    return delay(found)


def _least(schedule: Schedule) -> Staleness:
    return freshest(schedule.timing, schedule.n_stages, schedule.n_microbatches)


def _slack(schedule: Schedule) -> list[list[int]]:
    """``[stage][microbatch]``, ticks from the update of the freshest weights to their forward."""
    timing, n = schedule.timing, schedule.n_microbatches
    return [
        [
            timing.starts[Op(Kind.FORWARD, j, m)]
            + (steps + 1) * timing.period
            - timing.update_ready(j, n)
            for m, steps in enumerate(row)
        ]
        for j, row in enumerate(_least(schedule))
    ]

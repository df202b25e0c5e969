"""Find a delay that costs no time on given links, in which no single weight could be fresher.

With every weight one step late (CDP-v1) no rank waits for weights; with the freshest that the
timing allows (CDP-v2) it waits for each. Between them each stage and micro-batch may read the
freshest weights that arrive before they are needed. Another delay may have a smaller mean: the
search adds fresh weights one after another, and takes none back.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs
from toolkit.errors import UserError
from toolkit.schedule import FRESHEST, Schedule
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.placement import IN_ORDER, ROTATED
from toolkit.schedule.staleness import Delay, Staleness, freshest
from toolkit.schedule.steady_state import steps_to_time

Make = Callable[..., Schedule]
"""Builds a schedule from a ``delay`` and ``chains``."""
Entry = tuple[int, int]
"""A stage, and a micro-batch that reads its weights."""


def affordable_delay(
    schedule: Schedule,
    costs: Costs,
    hardware: Hardware,
    *,
    within: float = 0.02,
    optimizer_bytes: Sequence[float] = (),
) -> Staleness:
    """Return a delay as fast as one with late weights, of which no single weight can be fresher.

    Weights that are read longest after their update become fresh first. The search bisects to the
    shortest time, common to all weights, that they have to arrive; then likewise stage by stage;
    then it tries each that is still late by itself. Each guess is simulated: seconds in all for 8
    stages and micro-batches, minutes for 16.

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
    timing, n_microbatches = schedule.timing, schedule.n_microbatches
    freshest_delay = freshest(timing, schedule.n_stages, n_microbatches)
    # Ticks from the update of the newest weights to the forward that may read them.
    slack_ticks = {
        (stage, microbatch): timing.starts[Op(Kind.FORWARD, stage, microbatch)]
        + timing.period
        - timing.update_ready(stage, n_microbatches)
        for stage, row in enumerate(freshest_delay)
        for microbatch, steps in enumerate(row)
        if steps == 0
    }
    entries_by_slack = sorted(slack_ticks, key=slack_ticks.__getitem__, reverse=True)

    def delay_with_fresh(fresh_entries: Sequence[Entry]) -> Staleness:
        return tuple(
            tuple(
                steps if (stage, microbatch) in fresh_entries else max(steps, 1)
                for microbatch, steps in enumerate(row)
            )
            for stage, row in enumerate(freshest_delay)
        )

    seconds = partial(step_seconds, costs=costs, hardware=hardware, optimizer_bytes=optimizer_bytes)
    limit = (1 + within) * seconds(replace(schedule, delay=delay_with_fresh([])))

    def is_affordable(fresh_entries: Sequence[Entry]) -> bool:
        try:
            return seconds(replace(schedule, delay=delay_with_fresh(fresh_entries))) <= limit
        except UserError:
            return False  # rotated chains need time to go round

    def extend(fresh_entries: list[Entry], groups: Iterable[list[Entry]]) -> list[Entry]:
        """Return ``fresh_entries`` and as many leading ``groups`` as are affordable together."""
        candidates = [*accumulate(groups, initial=fresh_entries)]
        return candidates[
            bisect_left(
                candidates[1:], True, key=lambda fresh_entries: not is_affordable(fresh_entries)
            )
        ]

    fresh_entries = extend(
        [], ([*group] for _, group in groupby(entries_by_slack, key=slack_ticks.__getitem__))
    )
    for stage in range(schedule.n_stages):
        fresh_entries = extend(
            fresh_entries,
            (
                [entry]
                for entry in entries_by_slack
                if entry[0] == stage and entry not in fresh_entries
            ),
        )
    for entry in entries_by_slack:
        if entry not in fresh_entries:
            fresh_entries = extend(fresh_entries, [[entry]])
    return delay_with_fresh(fresh_entries)


def affordable_schedule(
    make: Make, costs: Costs, hardware: Hardware, *, within: float = 0.02
) -> Schedule:
    """Return a schedule in nearly the time of late weights; no single weight could be fresher.

    It has the chains that are faster: those of the freshest delay if that is fast enough, and of
    weights one step late otherwise.

    Args:
        make: function that builds a schedule from ``delay`` and ``chains``.
        costs: one entry per stage.
        hardware: seconds of messages, and of kernels that were not measured.
        within: share by which a step may take longer than with every weight one step late.
    """
    late_schedule, fresh_schedule = (
        fastest(make, delay, costs, hardware) for delay in (1, FRESHEST)
    )
    step_times = [
        step_seconds(schedule, costs, hardware) for schedule in (late_schedule, fresh_schedule)
    ]
    if step_times[1] <= (1 + within) * step_times[0]:
        return fresh_schedule
    return replace(
        late_schedule, delay=affordable_delay(late_schedule, costs, hardware, within=within)
    )


def fastest(make: Make, delay: Delay, costs: Costs, hardware: Hardware) -> Schedule:
    """Return the schedule with a delay and the chains that take less time."""
    schedules = [make(delay=delay, chains=IN_ORDER)]
    with suppress(UserError):  # no time to go round, or only one rank
        schedules.append(make(delay=delay, chains=ROTATED))
    return min(schedules, key=partial(step_seconds, costs=costs, hardware=hardware))


def step_seconds(
    schedule: Schedule, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float] = ()
) -> float:
    """Return the simulated seconds of a training step in the steady state."""
    program = schedule.lower(steps_to_time(schedule)).verify()
    return simulate(program, costs, hardware, optimizer_bytes).step_time

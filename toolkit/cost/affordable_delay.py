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
from toolkit.cost.stage_costs import Costs
from toolkit.cost.steady_steps import simulate_steady_steps
from toolkit.errors import UserError
from toolkit.schedule import FRESHEST, Schedule
from toolkit.schedule.instruction import Kind, Op
from toolkit.schedule.reduction_order import IN_ORDER, ROTATED
from toolkit.schedule.staleness import Delay, Staleness, freshest

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
    """Return a delay as fast as one with late weights, in which no single weight can be fresher.

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
    search = _DelaySearch(schedule, costs, hardware, optimizer_bytes)
    # Without fresh weights no rank waits for weights: no delay takes less time.
    limit = (1 + within) * search.seconds([])
    entries = search.entries_by_slack()

    # 1. All weights together: those of the longest slack first, equal slack at once.
    # groupby needs neighbours of equal slack: entries are sorted by it.
    groups = [[*group] for _, group in groupby(entries, key=search.slack_ticks)]
    fresh_entries = search.extend([], groups, limit)

    # 2. Stage by stage.
    for stage in range(schedule.n_stages):
        late_entries = [
            [entry]
            for entry in entries
            if entry[0] == stage and entry not in fresh_entries
        ]
        fresh_entries = search.extend(fresh_entries, late_entries, limit)

    # 3. Each that is still late by itself.
    for entry in entries:
        if entry not in fresh_entries:
            fresh_entries = search.extend(fresh_entries, [[entry]], limit)
    return search.delay(fresh_entries)


class _DelaySearch:
    """Delays between that of CDP-v1 and the freshest that a timing allows.

    Slack is from the update of the newest weights to the forward that may read them::

        owner of the stage     | update |
        messages                         ------->
        reader                                       | F |
        slack                           |------------|
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        hardware: Hardware,
        optimizer_bytes: Sequence[float],
    ) -> None:
        self._schedule = schedule
        self._costs = costs
        self._hardware = hardware
        self._optimizer_bytes = optimizer_bytes
        self._freshest = freshest(
            schedule.timing, schedule.n_stages, schedule.n_microbatches
        )

    def slack_ticks(self, entry: Entry) -> int:
        """Return the ticks for which newest weights may travel before they are read."""
        stage, microbatch = entry
        timing = self._schedule.timing
        # Weights of an update are read at the earliest by the forward of the next period.
        next_forward = (
            timing.starts[Op(Kind.FORWARD, stage, microbatch)] + timing.period
        )
        return next_forward - timing.update_ready(stage, self._schedule.n_microbatches)

    def entries_by_slack(self) -> list[Entry]:
        """Return the entries that may be fresh, the longest slack first."""
        entries = []
        for stage, delays in enumerate(self._freshest):
            for microbatch, steps in enumerate(delays):
                if steps == 0:
                    entries.append((stage, microbatch))
        return sorted(entries, key=self.slack_ticks, reverse=True)

    def delay(self, fresh_entries: Sequence[Entry]) -> Staleness:
        """Return the delay in which these entries are fresh and all others at least a step late."""
        rows = []
        for stage, delays in enumerate(self._freshest):
            # A weight that the timing makes late anyway stays as late as it is; others become one
            # step late.
            row = [max(steps, 1) for steps in delays]
            for microbatch, steps in enumerate(delays):
                if (stage, microbatch) in fresh_entries:
                    row[microbatch] = steps
            rows.append(tuple(row))
        return tuple(rows)

    def seconds(self, fresh_entries: Sequence[Entry]) -> float:
        """Return the seconds of a training step; errors as of :class:`Schedule`."""
        schedule = replace(self._schedule, delay=self.delay(fresh_entries))
        return step_seconds(
            schedule, self._costs, self._hardware, self._optimizer_bytes
        )

    def extend(
        self, fresh_entries: list[Entry], groups: Iterable[list[Entry]], limit: float
    ) -> list[Entry]:
        """Add as many leading ``groups`` as are affordable together.

        Args:
            fresh_entries: those that are affordable.
            groups: entries to add, a group at once.
            limit: seconds of a training step.
        """

        def is_too_slow(candidate: list[Entry]) -> bool:
            try:
                return self.seconds(candidate) > limit
            except UserError:
                return True  # rotated chains need time to go round

        # More fresh weights take no less time, so that bisection finds the last affordable ones.
        candidates = [*accumulate(groups, initial=fresh_entries)]
        n_affordable_groups = bisect_left(candidates[1:], True, key=is_too_slow)
        return candidates[n_affordable_groups]


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
    late_schedule = fastest(make, 1, costs, hardware)
    fresh_schedule = fastest(make, FRESHEST, costs, hardware)
    limit = (1 + within) * step_seconds(late_schedule, costs, hardware)
    if step_seconds(fresh_schedule, costs, hardware) <= limit:
        return fresh_schedule
    delay = affordable_delay(late_schedule, costs, hardware, within=within)
    return replace(late_schedule, delay=delay)


def fastest(make: Make, delay: Delay, costs: Costs, hardware: Hardware) -> Schedule:
    """Return the schedule with a delay and the chains that take less time."""
    schedules = [make(delay=delay, chains=IN_ORDER)]
    with suppress(UserError):  # no time to go round, or only one rank
        schedules.append(make(delay=delay, chains=ROTATED))
    return min(schedules, key=partial(step_seconds, costs=costs, hardware=hardware))


def step_seconds(
    schedule: Schedule,
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[float] = (),
) -> float:
    """Return the simulated seconds of a training step in the steady state."""
    return simulate_steady_steps(schedule, costs, hardware, optimizer_bytes).step_time

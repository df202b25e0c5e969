"""Specs of schedules that train one after another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from toolkit.schedule.phases import after
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.spec import PhaseSpec, ScheduleSpec, phases_of


def with_phases(
    schedule: Schedule, descriptions: Sequence[Mapping[str, Any]]
) -> Schedule:
    """Return ``schedule`` after others; arguments and errors as :meth:`ScheduleSpec.after`."""
    if not descriptions:
        return schedule
    phases = [phase.build() for phase in phases_of(schedule, descriptions)]
    return after(phases, schedule)


def in_order(lengths: Iterable[tuple[Schedule, int]]) -> ScheduleSpec:
    """Return the spec of schedules that train one after another.

    Args:
        lengths: schedules and the training steps of each; the last continues.

    Raises:
        UserError: one has no spec.
    """
    *phases, last = [
        PhaseSpec(ScheduleSpec.of(schedule), steps) for schedule, steps in lengths
    ]
    # The last one trains to the end: its length is left out.
    return replace(last.spec, phases=tuple(phases))

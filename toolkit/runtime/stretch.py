"""Training steps that a controller sends to its ranks at once, and repeats if it loses one."""

from dataclasses import dataclass, field

from toolkit.runtime.microbatches import Share
from toolkit.schedule import Schedule

_STEPS_AHEAD = 2  # training steps whose data are sent before they can begin


@dataclass(frozen=True)
class Stretch:
    """Training steps that are repeated if a rank is lost among them.

    Attributes:
        first_step: the first of them.
        n_steps: their number.
        shares: their batches as far as they have been read; each is None once it has been sent, if
            no step is repeated.
    """

    first_step: int
    n_steps: int
    shares: list[Share] = field(default_factory=list)


def steps_ahead(schedule_plan: Schedule, first_step: int, n_steps: int) -> int:
    """Return how many steps a rank has the data of, besides those that have ended.

    A rank may begin a step before others end the previous ones, so it needs the data of all steps
    that overlap.

    Args:
        schedule_plan: what runs, and when it changes.
        first_step: of the stretch.
        n_steps: of the stretch.
    """
    # A plan may change its schedule within the stretch: the one with the most overlap decides.
    changes = schedule_plan.changes(range(first_step, first_step + n_steps))
    schedules = [schedule_plan.at(step) for step in (first_step, *changes)]
    n_overlapping = max(schedule.timing.steps_under_way for schedule in schedules)
    return _STEPS_AHEAD + n_overlapping

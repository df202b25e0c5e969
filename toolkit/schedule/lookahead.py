"""How long before its place in the program a message may go."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule

_PREFETCHED = 2  # slots


def lookahead(schedule: "Schedule") -> int:
    """In ticks, by the ops that its ranks have come to.

    Twice as long as a micro-batch is under way, so that a message of every step has two buffers.
    Where the state is sharded weights are fetched for a few slots only: a rank holds its share and
    little more.
    """
    slots = _PREFETCHED if schedule.state == "sharded" else 4 * schedule.n_stages
    return slots * schedule.timing.ticks_per_slot

"""How long before its place in the program a message may go."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule

_PREFETCHED = 2  # slots


def lookahead(schedule: "Schedule") -> int:
    """Ticks by which a message may start before its place in the program.

    They are measured from the op that each of its ranks has reached. Two micro-batch lifetimes, so
    that each kind of message has two buffers; where the state is sharded, only a few slots, so that
    a rank holds its share of the weights and little more.
    """
    slots = _PREFETCHED if schedule.state == "sharded" else 4 * schedule.n_stages
    return slots * schedule.timing.ticks_per_slot

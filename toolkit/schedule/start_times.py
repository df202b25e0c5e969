"""When ranks and messages start, relative to their place in the schedule."""

from toolkit.schedule.instruction import Action
from toolkit.schedule.program import Program
from toolkit.schedule.schedule import Schedule

_PREFETCHED = 2  # slots


def lookahead(schedule: Schedule) -> int:
    """Ticks by which a message may start before its place in the program.

    They are measured from the op that each of its ranks has reached. Two micro-batch lifetimes, so
    that each kind of message has two buffers; where the state is sharded, only a few slots, so that
    a rank holds its share of the weights and little more.
    """
    slots = _PREFETCHED if schedule.state == "sharded" else 4 * schedule.n_stages
    return slots * schedule.timing.ticks_per_slot


def first_forwards(program: Program) -> dict[int, int]:
    """The tick of the first forward of each rank that begins with the model's first stage."""
    found = {}
    for rank, instructions in enumerate(program.ranks):
        first = next((i for i in instructions if i.action == Action.FORWARD), None)
        if first is not None and first.stage == 0:
            found[rank] = first.tick
    return found

"""Which ranks wait for their place in the schedule as a program starts."""

from toolkit.schedule.instruction import Action
from toolkit.schedule.program import Program


def turns(program: Program) -> dict[int, int]:
    """The tick of the first forward of each rank that begins with the model's first stage."""
    found = {}
    for rank, instructions in enumerate(program.ranks):
        first = next((i for i in instructions if i.action == Action.FORWARD), None)
        if first is not None and first.stage == 0:
            found[rank] = first.tick
    return found

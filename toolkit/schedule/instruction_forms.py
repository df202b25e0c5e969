"""Which fields each instruction has, and what they may refer to."""

from itertools import product
from typing import TYPE_CHECKING

from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    ALL_REDUCE,
    BROADCAST,
    COMPENSATED,
    FREE,
    GRADIENT,
    PREDICT,
    PREDICTION,
    RECV,
    REDUCE,
    SEND,
    UPDATE,
    WEIGHTS,
    Action,
    Buffer,
    Instruction,
    Kind,
)

if TYPE_CHECKING:
    from toolkit.schedule.program import Program

_MESSAGES = (SEND, RECV)
_SUMS = (ALL_REDUCE, REDUCE)

# The fields that an instruction has: m micro-batch, t step, v version.
_FIELDS: dict[tuple[Action, Buffer | None], str] = {
    **dict.fromkeys(product(map(Action, Kind), (None, PREDICTION, COMPENSATED)), "mtv"),
    (UPDATE, None): "tv",
    (PREDICT, PREDICTION): "tv",
    **dict.fromkeys(product(_MESSAGES, (ACTIVATION, ACTIVATION_GRADIENT)), "mt"),
    **dict.fromkeys(product((*_MESSAGES, *_SUMS), (GRADIENT,)), "t"),
    **dict.fromkeys(product((*_MESSAGES, BROADCAST, FREE), (WEIGHTS,)), "v"),
    (FREE, ACTIVATION): "mt",
    (FREE, PREDICTION): "tv",
}
# One set of tuples, since a program has a million instructions: action, buffer, and whether
# micro-batch, step and version are None.
_FORMS = {
    (*form, "m" not in fields, "t" not in fields, "v" not in fields)
    for form, fields in _FIELDS.items()
}


class FormCheck:
    """Says what makes an instruction one of no program on these ranks, stages and steps."""

    def __init__(self, program: "Program") -> None:
        schedule = program.schedule
        self.ranks = range(len(program.ranks))
        self.stages = {*range(schedule.n_stages)}
        self.microbatches = {None, *range(schedule.n_microbatches)}
        self.steps = {None, *program.steps}

    def fault(self, rank: int, i: Instruction) -> str | None:
        """Return what is wrong with an instruction of ``rank``, or None."""
        _, action, stage, microbatch, step, version, buffer, peers = i
        form = (action, buffer, microbatch is None, step is None, version is None)
        if form not in _FORMS:
            return "there is no instruction of these fields"
        is_inside = (
            stage in self.stages
            and microbatch in self.microbatches
            and step in self.steps
        )
        if not is_inside:
            return "the program has no such stage, micro-batch or step"
        if action in _MESSAGES:
            has_peers = len(peers) == 1 and peers[0] != rank and peers[0] in self.ranks
        elif action.communicates:
            # A peer that occurs twice, or is no rank, makes the set smaller.
            has_peers = rank in peers and len({*peers}.intersection(self.ranks)) == len(
                peers
            )
        else:
            has_peers = not peers
        return None if has_peers else "there are no such peers"

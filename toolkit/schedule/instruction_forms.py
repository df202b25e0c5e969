"""Which fields each instruction has, and what they may refer to."""

from collections.abc import Sequence
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

    def find(
        self, rank: int, instructions: Sequence[Instruction]
    ) -> tuple[Instruction, str] | None:
        """Return the first faulty instruction of ``rank`` and what is wrong with it, or None."""
        if self._are_sound(rank, instructions):
            return None
        for instruction in instructions:
            fault = self.fault(rank, instruction)
            if fault is not None:
                return instruction, fault
        return None

    def _are_sound(self, rank: int, instructions: Sequence[Instruction]) -> bool:
        """Whether :meth:`fault` finds nothing in any instruction of ``rank``."""
        # A rank has many instructions but few different values of each field, so each value is
        # checked once: this takes a third of the time.
        if not instructions:
            return True
        _, actions, stages, microbatches, steps, versions, buffers, peers = zip(
            *instructions, strict=True
        )
        is_inside = (
            self.stages.issuperset(stages)
            and self.microbatches.issuperset(microbatches)
            and self.steps.issuperset(steps)
        )
        forms = zip(
            actions,
            buffers,
            [microbatch is None for microbatch in microbatches],
            [step is None for step in steps],
            [version is None for version in versions],
            strict=True,
        )
        if not is_inside or not _FORMS.issuperset(forms):
            return False
        return all(
            self._has_peers(rank, action, peers_of_action)
            for action, peers_of_action in {*zip(actions, peers, strict=True)}
        )

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
        if not self._has_peers(rank, action, peers):
            return "there are no such peers"
        return None

    def _has_peers(self, rank: int, action: Action, peers: tuple[int, ...]) -> bool:
        """Whether ``rank`` can do ``action`` with these peers."""
        if action in _MESSAGES:
            return len(peers) == 1 and peers[0] != rank and peers[0] in self.ranks
        if action.communicates:
            # A peer that occurs twice, or is no rank, makes the set smaller.
            return rank in peers and len({*peers}.intersection(self.ranks)) == len(
                peers
            )
        return not peers

"""The units of work: ops of a schedule, and instructions of a lowered program."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple


class Kind(IntEnum):
    """What an op computes: a forward, a whole backward, or half of one."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2  # the gradient with respect to the stage's input
    BACKWARD_WEIGHT = 3  # with respect to its parameters


LETTERS = "FBIW"
"""A letter for each kind, as in torch.distributed.pipelining."""


class Op(NamedTuple):
    """One kind of computation of ``stage`` on ``microbatch``; both count from 0."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.microbatch}"


class Action(IntEnum):
    """What an instruction does. The first four are the kinds of op, with the same values."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3
    UPDATE = 4
    PREDICT = 5
    SEND = 6
    RECV = 7
    ALL_REDUCE = 8
    REDUCE = 9
    BROADCAST = 10
    FREE = 11

    @cached_property
    def computes(self) -> bool:
        """Whether it is an op: a forward, a backward or half of one."""
        return self <= Action.BACKWARD_WEIGHT

    @cached_property
    def communicates(self) -> bool:
        """Whether it is a message or a collective."""
        return Action.SEND <= self <= Action.BROADCAST

    @cached_property
    def label(self) -> str:
        """Its name in words: ``backward input``, ``all-reduce``."""
        return self.name.lower().replace("_", "-" if self.communicates else " ")


class Buffer(IntEnum):
    """What is sent, received, reduced, predicted or freed."""

    ACTIVATION = 0  # a message: a stage's output; freed: all that it keeps for its backward
    ACTIVATION_GRADIENT = 1  # with respect to a stage's input
    GRADIENT = 2  # of a stage's parameters, summed over micro-batches
    WEIGHTS = 3  # one version of a stage's parameters
    PREDICTION = 4  # what a later version is predicted to be
    COMPENSATED = 5  # of a backward: it also reads the version of its step, for its gradient

    @cached_property
    def label(self) -> str:
        """Its name in words."""
        return self.name.lower().replace("_", " ")


# The members' own names: Python 3.11 takes ten times as long to look them up in their class.
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = [*Action][: len(Kind)]
UPDATE, PREDICT, SEND, RECV, ALL_REDUCE, REDUCE, BROADCAST, FREE = [*Action][len(Kind) :]
ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, WEIGHTS, PREDICTION, COMPENSATED = Buffer

_MESSAGES = (SEND, RECV)

WeightsKey = tuple[int, int | None] | tuple[int, int | None, int | None]
"""Stage and version of weights; of a prediction made from them also the step it is for."""


class Instruction(NamedTuple):
    """One entry of a rank's program. Fields that do not apply are None.

    An op with ``buffer`` ``PREDICTION`` reads weights predicted from ``version`` for its step; one
    with ``COMPENSATED`` reads ``version`` and the weights of its step.
    """

    tick: int  # when it starts
    action: Action
    stage: int
    microbatch: int | None = None
    step: int | None = None
    version: int | None = None  # weights read (op, predict), made (update), moved or freed
    buffer: Buffer | None = None  # what is moved or freed
    peers: tuple[int, ...] = ()  # receiver, sender, or all ranks of a collective, root first

    @property
    def weights(self) -> WeightsKey:
        """The weights that it reads, makes, moves or frees."""
        if self.buffer == PREDICTION:
            return self.stage, self.version, self.step
        return self.stage, self.version

    @property
    def of_step(self) -> int | None:
        """Its training step; for messages of weights, the step that begins with them."""
        return self.version if self.step is None else self.step

    @property
    def reads(self) -> tuple[WeightsKey, ...]:
        """The weights that an op reads; of a prediction, a version and the one before it."""
        if self.action == PREDICT:
            assert self.version is not None
            return (self.stage, self.version), (self.stage, self.version - 1)
        if self.buffer == COMPENSATED:
            return self.weights, (self.stage, self.step)
        return (self.weights,)

    def meeting(self, rank: int) -> tuple:
        """Key of a message or collective: the k-th of a key on one rank meets others' k-th."""
        if self.action not in _MESSAGES:
            return self[1:]
        ends = (rank, *self.peers) if self.action == SEND else (*self.peers, rank)
        return (*ends, *self[2:7])

    @property
    def moves_parameters(self) -> bool:
        """Whether it is a message or a collective of weights or gradients."""
        return self.action.communicates and self.buffer in (GRADIENT, WEIGHTS)

    def gives(self, rank: int) -> bool:
        """Whether ``rank`` puts something of its own into a message or a collective."""
        if self.action == BROADCAST:
            return rank == self.peers[0]
        return self.action != RECV

    def leaves(self, rank: int) -> bool:
        """Whether ``rank`` gets something new from a message or a collective."""
        if self.action == REDUCE:
            return rank == self.peers[0]
        if self.action == BROADCAST:
            return rank != self.peers[0]
        return self.action != SEND

    @property
    def op(self) -> Op:
        """The op of an instruction that computes."""
        return Op(Kind(self.action), self.stage, self.microbatch or 0)

    @property
    def label(self) -> str:
        """Its name in timelines."""
        if self.buffer is not None and self.action in _MESSAGES:
            return self.buffer.label
        if self.action.computes:
            return str(self.op)
        if self.action.communicates:
            return self.action.label
        return f"{self.action.label} {self.stage}"

    def __str__(self) -> str:
        words = [self.action.name]
        if self.buffer is not None:
            words.append(self.buffer.label)
        words.append(f"stage {self.stage}")
        for name in ("microbatch", "step", "version"):
            if (value := getattr(self, name)) is not None:
                words.append(f"{name} {value}")
        if self.peers:
            word = {SEND: "to", RECV: "from"}.get(self.action, "among")
            words.append(f"{word} rank {', '.join(map(str, self.peers))}")
        return " ".join(words)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause garbage collection in a context, for code that makes no reference cycles."""
    # The collector would search a growing program of a million tuples again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

"""The units of work: ops of a schedule, and instructions of a lowered program."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple


# Kinds and actions are integers: they sort ops, index tables of handlers, and hash as fast as ints,
# which counts in a program of a million instructions.
class Kind(IntEnum):
    """What an op computes: a forward, a whole backward, or half of one.

    Attributes:
        FORWARD: the stage's output.
        BACKWARD: the gradients of the stage's input and of its parameters.
        BACKWARD_INPUT: the gradient of the input alone, the first half of a backward.
        BACKWARD_WEIGHT: the gradient of the parameters alone, the second half.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_INPUT = 2
    BACKWARD_WEIGHT = 3


LETTERS = "FBIW"
"""A letter for each kind, as in torch.distributed.pipelining."""


class Op(NamedTuple):
    """One computation of a training step.

    Args:
        kind: a forward, a backward, or half of one.
        stage: stage of the model, 0 .. n_stages-1.
        microbatch: micro-batch of the step, 0 .. n_microbatches-1.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.kind]}{self.microbatch}"


# The order is used: ops first, then what one rank does by itself, then what ranks do together, from
# SEND to BROADCAST. Tables by action rely on it (verify, dependencies, replay).
class Action(IntEnum):
    """What an instruction does. The first four are the kinds of op, with the same values.

    Attributes:
        FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT: see :class:`Kind`.
        UPDATE: the optimizer's step of a stage, which makes the next weight version.
        PREDICT: make weights that stand for a later version.
        SEND: send a buffer to one rank; it waits for the receive.
        RECV: receive a buffer from one rank.
        ALL_REDUCE: sum gradients over ranks; all of them get the sum.
        REDUCE: sum gradients over ranks; the first of its peers gets the sum.
        BROADCAST: the first of its peers sends weights to the others.
        FREE: release activations, weights or a prediction.
    """

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

    # Cached on the twelve members: a plain property would decide anew for each instruction.
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
    """What is sent, received, reduced, predicted or freed.

    Attributes:
        ACTIVATION: of a message, a stage's output; of a free, all that a forward keeps for its
            backward.
        ACTIVATION_GRADIENT: the gradient of a stage's input.
        GRADIENT: the gradient of a stage's parameters, summed over micro-batches.
        WEIGHTS: one version of a stage's parameters.
        PREDICTION: what a later version is predicted to be; an op with it reads the prediction.
        COMPENSATED: of a backward, which also reads the version of its step, for its gradient.
    """

    ACTIVATION = 0
    ACTIVATION_GRADIENT = 1
    GRADIENT = 2
    WEIGHTS = 3
    PREDICTION = 4
    COMPENSATED = 5

    @cached_property
    def label(self) -> str:
        """Its name in words."""
        return self.name.lower().replace("_", " ")


# The members' own names: Python 3.11 takes ten times as long to look them up in their class.
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = [*Action][: len(Kind)]
UPDATE, PREDICT, SEND, RECV, ALL_REDUCE, REDUCE, BROADCAST, FREE = [*Action][
    len(Kind) :
]
ACTIVATION, ACTIVATION_GRADIENT, GRADIENT, WEIGHTS, PREDICTION, COMPENSATED = Buffer

_MESSAGES = (SEND, RECV)

WeightsKey = tuple[int, int | None] | tuple[int, int | None, int | None]
"""Stage and version of weights; of a prediction made from them also the step it is for."""


class Instruction(NamedTuple):
    """One entry of a rank's program. Fields that do not apply are None.

    An op with ``buffer`` ``PREDICTION`` reads weights predicted from ``version`` for its step; one
    with ``COMPENSATED`` reads ``version`` and the weights of its step.

    Args:
        tick: when it starts, from the start of the program.
        action: what it does.
        stage: stage of the model.
        microbatch: micro-batch of an op, a boundary message or freed activations.
        step: training step, from 0.
        version: version of the weights that it reads (op, predict), makes (update), moves or frees.
        buffer: what is moved or freed.
        peers: the receiver of a send, the sender of a receive; all ranks of a collective, its root
            first.
    """

    tick: int
    action: Action
    stage: int
    microbatch: int | None = None
    step: int | None = None
    version: int | None = None
    buffer: Buffer | None = None
    peers: tuple[int, ...] = ()

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
            # All but the tick, which does not decide who meets whom: an order may be proven without
            # its ticks.
            return self[1:]
        # Sender and receiver, in this order at both ends, so that their keys are equal.
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
        # An op always has a micro-batch; the 0 is for the type checker.
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
            value = getattr(self, name)
            if value is not None:
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

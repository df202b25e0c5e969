"""What each rank does, in order: the lowered form that is verified, simulated and run."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from toolkit.schedule.op import Kind, Op

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule


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

    @property
    def computes(self) -> bool:
        return self <= Action.BACKWARD_WEIGHT

    @property
    def communicates(self) -> bool:
        return Action.SEND <= self <= Action.BROADCAST

    @cached_property
    def label(self) -> str:
        """Its name in words: ``backward input``, ``all-reduce``."""
        return self.name.lower().replace("_", "-" if self.communicates else " ")


class Buffer(IntEnum):
    """What is sent, received, reduced, predicted or freed.

    ``ACTIVATION`` as a message is the output of a stage's forward; freed, it is everything that
    the stage keeps for its backward. ``ACTIVATION_GRADIENT`` is the gradient with respect to a
    stage's input. ``GRADIENT`` is a sum over micro-batches of gradients with respect to a stage's
    parameters. ``WEIGHTS`` is one version of a stage's parameters, and ``PREDICTION`` what a later
    one is expected to be.
    """

    ACTIVATION = 0
    ACTIVATION_GRADIENT = 1
    GRADIENT = 2
    WEIGHTS = 3
    PREDICTION = 4

    @cached_property
    def label(self) -> str:
        """Its name in words."""
        return self.name.lower().replace("_", " ")


WeightsKey = tuple[int, int | None] | tuple[int, int | None, int | None]
"""Stage and version of weights; of a prediction made from them also the step it is for."""


class Instruction(NamedTuple):
    """One entry of a rank's program.

    ``tick`` is when it starts; ``version`` is the weight version read (forward, backward, predict),
    made (update) or meant (messages and frees of weights); ``peers`` are the receiver of a send,
    the sender of a receive, or every rank of a collective, the root first. An op whose ``buffer``
    is ``PREDICTION`` reads what ``version`` lets expect of the weights of its ``step``. What does
    not apply is None.
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
        if self.buffer == Buffer.PREDICTION:
            return self.stage, self.version, self.step
        return self.stage, self.version

    @property
    def of_step(self) -> int | None:
        """The training step that it is of; of messages of weights, that which begins with them."""
        return self.version if self.step is None else self.step

    @property
    def predicted_from(self) -> tuple[WeightsKey, WeightsKey]:
        """The weights that a prediction is made from: a version, and the one before it."""
        assert self.version is not None
        return (self.stage, self.version), (self.stage, self.version - 1)

    def gives(self, rank: int) -> bool:
        """Whether ``rank`` puts something of its own into a message or a collective."""
        return self.action != Action.RECV and (
            self.action != Action.BROADCAST or rank == self.peers[0]
        )

    def leaves(self, rank: int) -> bool:
        """Whether a message or a collective leaves ``rank`` with what is new to it."""
        if self.action == Action.REDUCE:
            return rank == self.peers[0]
        if self.action == Action.BROADCAST:
            return rank != self.peers[0]
        return self.action != Action.SEND

    @property
    def op(self) -> Op:
        """The op that it is, where it computes."""
        return Op(Kind(self.action), self.stage, self.microbatch or 0)

    @property
    def label(self) -> str:
        """What timelines call it: an op or another work of a stage, what is sent, a collective."""
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
            word = {Action.SEND: "to", Action.RECV: "from"}.get(self.action, "among")
            words.append(f"{word} rank {', '.join(map(str, self.peers))}")
        return " ".join(words)


class Traffic(NamedTuple):
    """What one rank sends in one slot: parameter messages, and their size in stage-parameters."""

    messages: int
    units: Fraction


# Looked up once: many instructions are counted.
_ACTIVATION, _WEIGHTS = Buffer.ACTIVATION, Buffer.WEIGHTS
_UPDATE, _PREDICT, _FREE = Action.UPDATE, Action.PREDICT, Action.FREE
_RECV, _BROADCAST = Action.RECV, Action.BROADCAST
_MESSAGES = (Action.SEND, Action.RECV)
_NOTHING, _MESSAGE = Traffic(0, Fraction(0)), Traffic(1, Fraction(1))
_SENDING = (Action.SEND, Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)


@dataclass(frozen=True)
class Program:
    """The instructions of every rank for ``n_steps`` training steps of ``schedule``.

    Each stage's ``schedule.first_holders`` begin with the versions that are made before the
    program and read in it. Ticks are counted from the start of ``first_step``;
    ``schedule.timing.ticks_per_slot`` of them make a slot.
    """

    schedule: "Schedule"
    n_steps: int
    ranks: tuple[tuple[Instruction, ...], ...]
    first_step: int = 0

    def __repr__(self) -> str:
        return (
            f"Program({self.schedule.name!r}, n_steps={self.n_steps}, first_step={self.first_step},"
            f" ranks={len(self.ranks)}, instructions={sum(map(len, self.ranks))})"
        )

    @property
    def steps(self) -> range:
        return range(self.first_step, self.first_step + self.n_steps)

    def slot(self, instruction: Instruction) -> int:
        return instruction.tick // self.schedule.timing.ticks_per_slot

    @cached_property
    def n_slots(self) -> int:
        """Slots until the last rank has finished."""
        last = max(i.tick for rank in self.ranks for i in rank)
        return -(-last // self.schedule.timing.ticks_per_slot)

    def verify(self) -> "Program":
        """Replay the program and return it.

        Raises:
            ValueError: an instruction lacks what it needs, or does what it must not; the message
                names rank, slot and instruction.
        """
        from toolkit.schedule.verify import verify

        verify(self)
        return self

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Activations alive during each slot: ``[rank][slot]``, in stage-activations."""
        tick = self.schedule.timing.ticks_per_slot
        return tuple(tuple(most_by_slot(_alive(r), self.n_slots, tick)) for r in self.ranks)

    def total_activations(self) -> tuple[int, ...]:
        """The most activations that all ranks hold together during each slot: ``[slot]``.

        It is less than the sum of their own most where these are not of one moment.
        """
        gained: defaultdict[int, int] = defaultdict(int)
        for instructions in self.ranks:
            before = 0
            for when, alive in _alive(instructions):
                gained[when] += alive - before
                before = alive
        ticks = sorted(gained)
        levels = accumulate(gained[when] for when in ticks)
        changes = zip(ticks, levels, strict=True)
        return tuple(most_by_slot(changes, self.n_slots, self.schedule.timing.ticks_per_slot))

    def peak_activations(self) -> tuple[int, ...]:
        """The most stage-activations that each rank holds at once."""
        return tuple(max(alive for _, alive in _alive(rank)) for rank in self.ranks)

    def peak_weights(self) -> tuple[int, ...]:
        """The most weights that each rank holds at once, in stage-parameters: all versions, and
        those predicted.
        """
        schedule = self.schedule
        peaks = []
        for rank, instructions in enumerate(self.ranks):
            held = sum(
                len(schedule.versions(j, self.first_step))
                for j in range(schedule.n_stages)
                if rank in schedule.first_holders(j)
            )
            gained = (_weights_gained(i, rank) for i in instructions)
            peaks.append(max(accumulate(gained, initial=held)))
        return tuple(peaks)

    def traffic(self, slots: range | None = None) -> tuple[tuple[Traffic, ...], ...]:
        """Weights and gradients sent: ``[slot][rank]``, for ``slots``, or else 0 .. n_slots.

        A message counts in the slot that begins when it is sent. Collectives among n ranks count
        by their usual forms: an all-reduce as a ring, 2(n-1) messages a rank of 1/n of the stage
        each; a broadcast or a reduction to one rank as a binomial tree of whole stages.
        """
        slots = range(self.n_slots + 1) if slots is None else slots
        total = [[_NOTHING] * len(self.ranks) for _ in slots]
        for rank, instructions in enumerate(self.ranks):
            sent: defaultdict[int, list[Traffic]] = defaultdict(list)
            for i in instructions:
                if (
                    i.action in _SENDING
                    and i.buffer in (Buffer.GRADIENT, Buffer.WEIGHTS)
                    and self.slot(i) in slots
                ):
                    sent[self.slot(i)].append(traffic_of(i, rank))
            for slot, found in sent.items():
                total[slots.index(slot)][rank] = found[0] if len(found) == 1 else _together(found)
        return tuple(map(tuple, total))


def most_by_slot(
    changes: Iterable[tuple[int, int]], n_slots: int, ticks_per_slot: int
) -> Iterator[int]:
    """The highest level in each slot, of a quantity that changes at ticks.

    A release at a slot's very start does not count in it, nor what it released.

    Args:
        changes: (tick, level from then on), in order.
    """
    coming = [*changes]
    level = at = 0
    for slot in range(n_slots):
        most = level
        while at < len(coming) and coming[at][0] < (slot + 1) * ticks_per_slot:
            when, level = coming[at]
            most = level if when == slot * ticks_per_slot else max(most, level)
            at += 1
        yield most


def _alive(instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """(tick, stage-activations alive) after each forward and each release."""
    alive = 0
    for i in instructions:
        if i.action == Action.FORWARD:
            alive += 1
        elif i.action == Action.FREE and i.buffer == Buffer.ACTIVATION:
            alive -= 1
        else:
            continue
        yield i.tick, alive


def _together(found: Sequence[Traffic]) -> Traffic:
    return Traffic(sum(f.messages for f in found), sum((f.units for f in found), Fraction()))


def rounds(action: Action, n_ranks: int) -> int:
    """Messages of a collective that wait for each other: of a ring, or of a binomial tree."""
    return 2 * (n_ranks - 1) if action == Action.ALL_REDUCE else (n_ranks - 1).bit_length()


def traffic_of(i: Instruction, rank: int) -> Traffic:
    """What ``rank`` sends by an instruction that moves weights or gradients."""
    if i.action == Action.SEND:
        return _MESSAGE
    n = len(i.peers)
    if i.action == Action.ALL_REDUCE:
        messages = rounds(i.action, n)
        return Traffic(messages, Fraction(messages, n))
    if i.action == Action.BROADCAST:
        messages = _tree_children(i.peers.index(rank), n)
    elif i.action == Action.REDUCE:
        messages = int(rank != i.peers[0])
    else:
        return _NOTHING
    return Traffic(messages, Fraction(messages))


def _weights_gained(i: Instruction, rank: int) -> int:
    """The stages' weights that ``rank`` holds more, or less, after an instruction."""
    action, buffer = i.action, i.buffer
    if buffer is None:  # an op that reads what is there, or an update
        return int(action == _UPDATE)
    if action == _FREE:
        return -int(buffer != _ACTIVATION)
    if buffer == _WEIGHTS:
        return int(action == _RECV or (action == _BROADCAST and rank != i.peers[0]))
    return int(action == _PREDICT)


def _tree_children(position: int, n: int) -> int:
    """Children of ``position`` in the binomial tree over 0 .. n-1 whose root is 0."""
    bits = range(position.bit_length(), n.bit_length())
    return sum(position + (1 << bit) < n for bit in bits)

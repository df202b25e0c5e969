"""What each rank does, in order: the lowered form that is verified, simulated and run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from toolkit.schedule.instruction import Action, Buffer, Instruction
from toolkit.schedule.verify import verify

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """The instructions of every rank for ``n_steps`` training steps of ``schedule``.

    Each stage's ``schedule.first_holders`` begin with the older versions that are read. Ticks count
    from the start of ``first_step``; ``schedule.timing.ticks_per_slot`` of them make a slot.
    """

    schedule: "Schedule"
    n_steps: int
    ranks: tuple[tuple[Instruction, ...], ...] = field(repr=False)  # [rank], in order
    first_step: int = 0
    changes: tuple[int, ...] = ()  # ticks at which all have finished, and another schedule begins

    @property
    def steps(self) -> range:
        """The training steps of the program."""
        return range(self.first_step, self.first_step + self.n_steps)

    def slot(self, instruction: Instruction) -> int:
        """Return the slot in which ``instruction`` starts, counted from the program's start."""
        return instruction.tick // self.schedule.timing.ticks_per_slot

    @cached_property
    def n_slots(self) -> int:
        """Slots until the last rank has finished."""
        last_tick = max(i.tick for rank in self.ranks for i in rank)
        return -(-last_tick // self.schedule.timing.ticks_per_slot)

    def verify(self) -> "Program":
        """Replay the program and return it.

        Raises UserError if an instruction lacks what it needs, or does what it must not; the
        message names rank, slot and instruction.
        """
        verify(self)
        return self

    def updated(self, rank: int) -> frozenset[int]:
        """Return the stages that a rank updates."""
        return frozenset(i.stage for i in self.ranks[rank] if i.action == Action.UPDATE)

    def first_forwards(self, since: int = 0) -> dict[int, int]:
        """Return the first forward of each rank that begins with the model's first stage.

        The first from the tick ``since`` on, in ticks from there.
        """
        starts = {}
        for rank, instructions in enumerate(self.ranks):
            forwards = (i for i in instructions if i.action == Action.FORWARD and i.tick >= since)
            if (first := next(forwards, None)) is not None and first.stage == 0:
                starts[rank] = first.tick - since
        return starts

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Activations alive during each slot: ``[rank][slot]``, in stage-activations."""
        tick = self.schedule.timing.ticks_per_slot
        return tuple(tuple(most_by_slot(_alive(r), self.n_slots, tick)) for r in self.ranks)

    def total_activations(self) -> tuple[int, ...]:
        """Return the most activations of all ranks at one moment of each slot, ``[slot]``."""
        gained: Counter[int] = Counter()
        for instructions in self.ranks:
            levels = [(0, 0), *_alive(instructions)]
            for (_, before), (tick, alive) in pairwise(levels):
                gained[tick] += alive - before
        ticks = sorted(gained)
        changes = zip(ticks, accumulate(gained[tick] for tick in ticks), strict=True)
        return tuple(most_by_slot(changes, self.n_slots, self.schedule.timing.ticks_per_slot))

    def peak_activations(self) -> tuple[int, ...]:
        """Return the most stage-activations that each rank holds at once, ``[rank]``."""
        return tuple(max((alive for _, alive in _alive(rank)), default=0) for rank in self.ranks)

    def peak_weights(self) -> tuple[int, ...]:
        """Return the most stage-parameters held at once, ``[rank]``: all versions, and predictions.

        In the program's order. With overlap see
        :func:`toolkit.schedule.overlapped_weights.most_weights`.
        """
        first_weights = [0] * len(self.ranks)
        for stage in range(self.schedule.n_stages):
            n_versions = len(self.schedule.versions(stage, self.first_step))
            for rank in self.schedule.first_holders(stage, self.first_step):
                first_weights[rank] += n_versions
        return tuple(
            max(
                accumulate(
                    (_weights_gained(i, rank) for i in instructions), initial=first_weights[rank]
                )
            )
            for rank, instructions in enumerate(self.ranks)
        )

    def traffic(self, slots: range | None = None) -> tuple[tuple["Traffic", ...], ...]:
        """Weights and gradients sent: ``[slot][rank]``.

        A message counts in the slot that begins when it is sent. Collectives among n ranks count
        by their usual forms: an all-reduce as a ring, 2(n-1) messages a rank of 1/n of the stage
        each; a broadcast or a reduction to one rank as a binomial tree of whole stages.
        ``slots`` are consecutive; None: all.
        """
        slots = range(self.n_slots + 1) if slots is None else slots
        total = [[NOTHING] * len(self.ranks) for _ in slots]
        for rank, instructions in enumerate(self.ranks):
            sent_by_slot: defaultdict[int, list[Traffic]] = defaultdict(list)
            for i in instructions:
                if i.moves_parameters and i.action != Action.RECV and self.slot(i) in slots:
                    sent_by_slot[self.slot(i)].append(traffic_of(i, rank))
            for slot, messages in sent_by_slot.items():
                total[slots.index(slot)][rank] = together(messages)
        return tuple(map(tuple, total))


class Traffic(NamedTuple):
    """Parameter messages of one rank in one slot, and their size in stage-parameters."""

    messages: int
    units: Fraction


NOTHING = Traffic(0, Fraction(0))


def together(found: Sequence[Traffic]) -> Traffic:
    """Return the sum of all messages and units."""
    return Traffic(sum(f.messages for f in found), sum((f.units for f in found), Fraction()))


def units_sent(traffic: Sequence[Sequence[Traffic]]) -> tuple[Fraction, ...]:
    """Return what all ranks send in each slot, in stage-parameters, from ``[slot][rank]``."""
    return tuple(sum((sent.units for sent in slot if sent.units), Fraction()) for slot in traffic)


def rounds(action: Action, n_ranks: int) -> int:
    """Return how many messages of a collective, a ring or a binomial tree, wait for each other."""
    return 2 * (n_ranks - 1) if action == Action.ALL_REDUCE else (n_ranks - 1).bit_length()


def traffic_of(i: Instruction, rank: int) -> Traffic:
    """Return what ``rank`` sends by an instruction that moves weights or gradients."""
    if i.action == Action.ALL_REDUCE:
        messages = rounds(i.action, len(i.peers))
        return Traffic(messages, Fraction(messages, len(i.peers)))
    if i.action == Action.BROADCAST:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        messages = int(
            i.action == Action.SEND or (i.action == Action.REDUCE and rank != i.peers[0])
        )
    return Traffic(messages, Fraction(messages))


def received_of(i: Instruction, rank: int) -> Traffic:
    """Return what ``rank`` receives by an instruction that moves something."""
    if i.action == Action.ALL_REDUCE:
        return traffic_of(i, rank)
    if i.action == Action.REDUCE:
        messages = _tree_children(i.peers.index(rank), len(i.peers))
    else:
        messages = int(i.action.communicates and i.leaves(rank))
    return Traffic(messages, Fraction(messages))


def _tree_children(position: int, n: int) -> int:
    """Return how many children ``position`` has in the binomial tree over 0 .. n-1 with root 0."""
    bits = range(position.bit_length(), n.bit_length())
    return sum(position + (1 << bit) < n for bit in bits)


def most_by_slot(
    changes: Iterable[tuple[int, int]], n_slots: int, ticks_per_slot: int
) -> Iterator[int]:
    """Yield the highest level in each slot, from ordered ``changes`` = (tick, level from then on).

    What is released exactly at a slot's start does not count in that slot.
    """
    pending = [*changes]
    level = index = 0
    for slot in range(n_slots):
        peak = level
        while index < len(pending) and pending[index][0] < (slot + 1) * ticks_per_slot:
            tick, level = pending[index]
            peak = level if tick == slot * ticks_per_slot else max(peak, level)
            index += 1
        yield peak


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


def _weights_gained(i: Instruction, rank: int) -> int:
    """Return by how many stages' weights ``rank`` holds more, or less, after an instruction."""
    if i.action == Action.FREE:
        return -int(i.buffer != Buffer.ACTIVATION)
    if i.buffer == Buffer.WEIGHTS:
        return int(i.leaves(rank))
    return int(i.action in (Action.UPDATE, Action.PREDICT))

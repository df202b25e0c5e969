"""What each rank does, in order: the lowered form that is verified, simulated and run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from toolkit.schedule.instruction import Action, Buffer, Instruction
from toolkit.schedule.traffic import NOTHING, Traffic, total_traffic, traffic_of
from toolkit.schedule.verify import verify

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """The instructions of every rank for ``n_steps`` training steps of ``schedule``.

    Each stage's ``schedule.first_holders`` begin with the older versions that are read. Ticks count
    from the start of ``first_step``; ``schedule.timing.ticks_per_slot`` of them make a slot.

    Args:
        schedule: what was lowered.
        n_steps: training steps.
        ranks: ``[rank]``, its instructions in order.
        first_step: the first of the training steps.
        changes: ticks at which all have finished, and another schedule begins.
    """

    schedule: "Schedule"
    n_steps: int
    ranks: tuple[tuple[Instruction, ...], ...] = field(repr=False)
    first_step: int = 0
    changes: tuple[int, ...] = ()

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
        last_tick = max(i.tick for i in chain.from_iterable(self.ranks))
        return -(-last_tick // self.schedule.timing.ticks_per_slot)

    def verify(self) -> "Program":
        """Replay the program and return it.

        Raises:
            UserError: an instruction lacks what it needs, or does what it must not; the message
                names rank, slot and instruction.
        """
        verify(self)
        return self

    def updated(self, rank: int) -> frozenset[int]:
        """Return the stages that a rank updates."""
        return frozenset(i.stage for i in self.ranks[rank] if i.action == Action.UPDATE)

    def first_forwards(self, since: int = 0) -> dict[int, int]:
        """Return the first forward of each rank that begins with the model's first stage.

        Args:
            since: tick before which forwards do not count; the ticks returned count from it.
        """
        starts = {}
        for rank, instructions in enumerate(self.ranks):
            for i in instructions:
                if i.action == Action.FORWARD and i.tick >= since:
                    if i.stage == 0:
                        starts[rank] = i.tick - since
                    break
        return starts

    def activations(self) -> tuple[tuple[int, ...], ...]:
        """Activations alive during each slot: ``[rank][slot]``, in stage-activations."""
        return tuple(
            self._peak_of_slots(_live_activations(rank)) for rank in self.ranks
        )

    def total_activations(self) -> tuple[int, ...]:
        """Return the most activations of all ranks at one moment of each slot, ``[slot]``."""
        # Ranks have their peaks at different times: peaks do not add, changes do, tick by tick.
        change_at_tick: Counter[int] = Counter()
        for instructions in self.ranks:
            previous = 0
            for tick, n_live in _live_activations(instructions):
                change_at_tick[tick] += n_live - previous
                previous = n_live
        levels = []
        n_live = 0
        for tick in sorted(change_at_tick):
            n_live += change_at_tick[tick]
            levels.append((tick, n_live))
        return self._peak_of_slots(levels)

    def _peak_of_slots(self, levels: Iterable[tuple[int, int]]) -> tuple[int, ...]:
        ticks_per_slot = self.schedule.timing.ticks_per_slot
        return tuple(most_by_slot(levels, self.n_slots, ticks_per_slot))

    def peak_activations(self) -> tuple[int, ...]:
        """Return the most stage-activations that each rank holds at once, ``[rank]``."""
        peaks = []
        for instructions in self.ranks:
            levels = (n_live for _, n_live in _live_activations(instructions))
            peaks.append(max(levels, default=0))
        return tuple(peaks)

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
        peaks = []
        for rank, instructions in enumerate(self.ranks):
            n_held = peak = first_weights[rank]
            for i in instructions:
                n_held += _weights_gained(i, rank)
                peak = max(peak, n_held)
            peaks.append(peak)
        return tuple(peaks)

    def traffic(self, slots: range | None = None) -> tuple[tuple[Traffic, ...], ...]:
        """Weights and gradients sent: ``[slot][rank]``.

        A message counts in the slot that begins when it is sent; see
        :mod:`toolkit.schedule.traffic` for collectives.

        Args:
            slots: consecutive slots; None: all.
        """
        if slots is None:
            slots = range(self.n_slots + 1)
        table = [[NOTHING] * len(self.ranks) for _ in slots]
        # Grouped first: most slots of a rank send nothing, and fractions are slow to add.
        for rank, instructions in enumerate(self.ranks):
            sent_in_slot: defaultdict[int, list[Traffic]] = defaultdict(list)
            for i in instructions:
                if (
                    i.moves_parameters
                    and i.action != Action.RECV
                    and self.slot(i) in slots
                ):
                    sent_in_slot[self.slot(i)].append(traffic_of(i, rank))
            for slot, messages in sent_in_slot.items():
                table[slot - slots.start][rank] = total_traffic(messages)
        return tuple(map(tuple, table))


def most_by_slot(
    levels: Iterable[tuple[int, int]], n_slots: int, ticks_per_slot: int
) -> Iterator[int]:
    """Yield the highest level in each slot, from ordered ``levels`` = (tick, level from then on).

    What is released exactly at a slot's start does not count in that slot::

        slot        0         1         2
        level 3          +----+
              2     +----+    +----+
              1                    +---------
        yields      3         2         1
    """
    pending = [*levels]
    level = index = 0
    for slot in range(n_slots):
        peak = level
        while index < len(pending) and pending[index][0] < (slot + 1) * ticks_per_slot:
            tick, level = pending[index]
            peak = level if tick == slot * ticks_per_slot else max(peak, level)
            index += 1
        yield peak


def _live_activations(instructions: Sequence[Instruction]) -> Iterator[tuple[int, int]]:
    """Yield (tick, stage-activations alive) after each forward and each release."""
    n_live = 0
    for i in instructions:
        if i.action == Action.FORWARD:
            n_live += 1
        elif i.action == Action.FREE and i.buffer == Buffer.ACTIVATION:
            n_live -= 1
        else:
            continue
        yield i.tick, n_live


def _weights_gained(i: Instruction, rank: int) -> int:
    """Return by how many stages' weights ``rank`` holds more, or less, after an instruction."""
    if i.action == Action.FREE:  # of a version or a prediction
        return -int(i.buffer != Buffer.ACTIVATION)
    # Who receives a version holds one more; who sends it keeps it until its own free.
    if i.buffer == Buffer.WEIGHTS:
        return int(i.leaves(rank))
    # An update adds a version. It keeps the one before, which other micro-batches may still read.
    return int(i.action in (Action.UPDATE, Action.PREDICT))

"""Memory that ranks hold while a program runs.

It holds weights, activations, gradients, optimizer state if given, stage inputs from arrival to
backward, and workspace of running ops and of values between stages. What BACKWARD_INPUT leaves for
BACKWARD_WEIGHT is not counted.

A sum of gradients takes memory from its first contribution until the instruction that uses it ends.
Contributions that arrive after that instruction has begun start the next sum::

    contributions   +     +            +
    use of the sum             |----|
    memory          [---------------]  [----- ...

Where messages of weights are differences, a rank keeps a version that it has freed until the next
one comes; their owner also keeps exact weights.
"""

from collections import defaultdict
from collections.abc import Sequence

from toolkit.cost.stage_costs import Costs
from toolkit.cost.timeline import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    WEIGHTS,
    WORKING,
    Change,
)
from toolkit.schedule import Action, Buffer, Instruction, Program

InputKey = tuple[int, int, int | None, int | None]
"""Rank, stage, micro-batch and step of a stage's input."""

_new = tuple.__new__  # of many named tuples: their own constructors take twice as long


class MemoryChanges:
    """Changes of the memory of all ranks, in the order in which they are simulated.

    Attributes:
        changes: all of them so far.
    """

    def __init__(
        self, program: Program, costs: Costs, optimizer_bytes: Sequence[float]
    ) -> None:
        self.changes: list[Change] = []
        self._parameter_bytes = [cost.parameter_bytes for cost in costs]
        self._gradient_bytes = [cost.gradient_bytes for cost in costs]
        self._kept_bytes = [cost.kept_bytes for cost in costs]
        self._costs = costs
        # bytes of the inputs of stages that are there.
        self._inputs: dict[InputKey, float] = {}
        # times, by sum.
        self._contributions: defaultdict[tuple, list[float]] = defaultdict(list)
        schedule = program.schedule
        self._owners = schedule.owners
        self._has_differences = [cost.weight_differences for cost in costs]
        self._newest: dict[tuple[int, int], int] = {}  # versions, by rank and stage
        # Rank and stage of versions freed and kept.
        self._bases: set[tuple[int, int]] = set()
        if optimizer_bytes:
            for rank in range(len(program.ranks)):
                for stage in program.updated(rank):
                    self.hold(0.0, rank, OPTIMIZER, optimizer_bytes[stage])
        for stage in range(schedule.n_stages):
            first_versions = schedule.versions(stage, program.first_step)
            for rank in schedule.first_holders(stage, program.first_step):
                self.hold(
                    0.0,
                    rank,
                    WEIGHTS,
                    len(first_versions) * self._parameter_bytes[stage],
                )
                self._newest[rank, stage] = first_versions[-1]
            owner = schedule.owners[stage]
            # An owner that is the stage's only rank sends no weights, and needs no exact copy next
            # to them.
            if {*schedule.layout.ranks(stage)} != {owner}:
                self.hold(0.0, owner, WEIGHTS, costs[stage].exact_weight_bytes)
        for rank, instructions in enumerate(program.ranks):
            # One for each stage and receiver: what the last compressed message lost.
            for stage, _ in _compressed_sums(instructions, costs):
                self.hold(0.0, rank, GRADIENTS, costs[stage].error_bytes)

    def hold(self, when: float, rank: int, kind: str, n_bytes: float) -> None:
        """Hold bytes from ``when`` on; fewer if negative."""
        self.changes.append(_new(Change, (when, rank, kind, n_bytes)))

    def work(self, rank: int, start: float, end: float, n_bytes: float) -> None:
        """Hold workspace from ``start`` to ``end``."""
        if n_bytes > 0 and end > start:
            self.changes.append(_new(Change, (start, rank, WORKING, n_bytes)))
            self.changes.append(_new(Change, (end, rank, WORKING, -n_bytes)))

    def hold_weights(self, when: float, rank: int, stage: int) -> None:
        """Hold one more version of a stage's weights."""
        self.hold(when, rank, WEIGHTS, self._parameter_bytes[stage])

    def free_weights(self, when: float, rank: int, stage: int) -> None:
        """Free a version of a stage's weights."""
        self.hold(when, rank, WEIGHTS, -self._parameter_bytes[stage])

    def receive_weights(self, when: float, rank: int, stage: int, version: int) -> None:
        """Hold a version that came, in place of the one that it is a difference to."""
        self.hold_weights(when, rank, stage)
        self._newest[rank, stage] = version
        # The difference is added by now: its base, which the program freed before, goes only here.
        if (rank, stage) in self._bases:
            self._bases.remove((rank, stage))
            self.free_weights(when, rank, stage)

    def free_version(self, when: float, rank: int, stage: int, version: int) -> None:
        """Free a version, unless the next message is a difference to it."""
        is_newest = self._newest.get((rank, stage)) == version
        if self._has_differences[stage] and is_newest and rank != self._owners[stage]:
            self._bases.add((rank, stage))
        else:
            self.free_weights(when, rank, stage)

    def hold_activations(self, when: float, rank: int, stage: int) -> None:
        """Hold what a forward saves for its backward."""
        change = (when, rank, ACTIVATIONS, self._kept_bytes[stage])
        self.changes.append(_new(Change, change))

    def receive_input(self, when: float, key: InputKey, n_bytes: float) -> None:
        """Hold a stage's input from its arrival."""
        self._inputs[key] = n_bytes
        self.changes.append(_new(Change, (when, key[0], INPUTS, n_bytes)))

    def take_input(self, produced_at: float, key: InputKey) -> None:
        """Hold what a stage keeps of an input that its own rank has produced."""
        if key not in self._inputs:  # came by no message
            _, stage, _, _ = key
            extra_bytes = self._costs[stage].extra_input_bytes
            self.receive_input(produced_at, key, extra_bytes)

    def recompute(self, start: float, end: float, rank: int, stage: int) -> None:
        """Hold activations during a backward, if it computes them again."""
        if self._costs[stage].recomputes:
            n_bytes = self._costs[stage].activation_bytes
            self.hold(start, rank, ACTIVATIONS, n_bytes)
            self.hold(end, rank, ACTIVATIONS, -n_bytes)

    def free_microbatch(self, when: float, key: InputKey) -> None:
        """Free the activations of a stage on a micro-batch, and its input."""
        rank, stage, _, _ = key
        change = (when, rank, ACTIVATIONS, -self._kept_bytes[stage])
        self.changes.append(_new(Change, change))
        input_bytes = self._inputs.pop(key, 0.0)
        if input_bytes:
            self.changes.append(_new(Change, (when, rank, INPUTS, -input_bytes)))

    def add_to_sum(self, when: float, rank: int, stage: int, step: int | None) -> None:
        """Add a gradient to the sum on ``rank``."""
        self._contributions[rank, stage, step].append(when)

    def use_sum(
        self, start: float, end: float, rank: int, stage: int, step: int | None
    ) -> None:
        """Free the sum that an instruction uses from ``start`` to ``end``."""
        times = self._contributions.pop((rank, stage, step))
        n_bytes = self._gradient_bytes[stage]
        # A sum takes memory from its first gradient on, however many are added to it later.
        self.hold(min(times), rank, GRADIENTS, n_bytes)
        self.hold(end, rank, GRADIENTS, -n_bytes)
        # Instructions are not handled in order of time. A gradient that comes after the start of
        # this use is not in the sum that is used, but in the next one of this stage and step.
        later_times = [when for when in times if when > start]
        if later_times:
            self._contributions[rank, stage, step] = later_times


def _compressed_sums(
    instructions: Sequence[Instruction], costs: Costs
) -> set[tuple[int, tuple[int, ...]]]:
    """Return the stages and peers of the sums that a rank sends, if it keeps their errors."""
    if not any(cost.error_bytes for cost in costs):
        return set()
    return {
        (i.stage, i.peers)
        for i in instructions
        if i.action in (Action.SEND, Action.ALL_REDUCE) and i.buffer == Buffer.GRADIENT
    }

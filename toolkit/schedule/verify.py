"""Prove that a program is complete, consistent and free of deadlock, by replaying it once.

Linear in the number of instructions.

A rank may be several devices, each a process that carries out the rank's instructions. The proof
holds for these, too. Devices with the same number form a column, and send messages within it alone:
so each column is a run of the program that is proven here. Devices of one rank exchange only within
an op or an update. All of them carry out ops in the order of the program, and updates in that
order, so each begins the same exchanges in the same order. An exchange then adds no wait but that
for the same op or update of another column, whose inputs are proven to arrive.
"""

from collections.abc import Callable, Iterator
from math import inf
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.schedule import grid
from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    ALL_REDUCE,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPENSATED,
    FREE,
    GRADIENT,
    PREDICTION,
    RECV,
    SEND,
    UPDATE,
    WEIGHTS,
    Buffer,
    Instruction,
    Kind,
    Op,
    WeightsKey,
    collector_paused,
)
from toolkit.schedule.instruction_forms import FormCheck
from toolkit.schedule.promises import Promise, promises
from toolkit.schedule.rank_memory import RankMemory, RefusedError
from toolkit.schedule.replay import DeadlockError, replay

if TYPE_CHECKING:
    from toolkit.schedule.program import Program
    from toolkit.schedule.schedule import Schedule

_CORRECTED: dict[Buffer | None, str] = {
    PREDICTION: ", and to predict from it",
    COMPENSATED: ", and to compensate its gradient",
}


def verify(program: "Program") -> None:
    """See :meth:`Program.verify`."""
    # The order is proven first: it alone decides whether the program can run and what it computes.
    # Ticks are what figures and the simulator rely on.
    misplaced = verify_order(program)
    for rank, instructions in enumerate(program.ranks):
        before = -inf
        for instruction in instructions:
            tick = instruction.tick
            if tick < before:
                why = f"it stands after tick {before}"
                raise _error(program, rank, instruction, why)
            before = tick
    if misplaced:
        rank, instruction, why = misplaced[0]
        raise _error(program, rank, instruction, why)


def verify_order(program: "Program") -> list[tuple[int, Instruction, str]]:
    """Verify all but the ticks.

    Args:
        program: its instructions may stand in any order that can run.

    Returns:
        The instructions that stand at wrong ticks: rank, instruction and why.

    Raises:
        UserError: as :meth:`Program.verify`.
    """
    form_check = FormCheck(program)
    with collector_paused():
        for rank, instructions in enumerate(program.ranks):
            finding = form_check.find(rank, instructions)
            if finding is not None:
                instruction, fault = finding
                raise _error(program, rank, instruction, fault)
        machine = _Machine(program)
        carry_out = machine.by_action()
        try:
            # If one is refused, the loop's variables still hold it.
            for rank, instruction in replay(program.ranks):
                carry_out[instruction.action](rank, instruction)
        except RefusedError as refusal:
            raise _error(program, rank, instruction, str(refusal)) from None
        except DeadlockError as deadlock:
            raise _deadlock(program, deadlock.waiting) from None
    machine.check_end()
    return machine.misplaced


def _deadlock(program: "Program", waiting: dict[int, Instruction]) -> UserError:
    """The error of ranks that wait for each other, at the one that has waited longest."""
    # The rank that has waited longest is named first: the others often wait in consequence.
    by_tick = sorted(waiting.items(), key=lambda item: (item[1].tick, item[0]))
    (rank, instruction), *peers_waiting = by_tick
    peers = "; ".join(f"rank {peer} waits at {i}" for peer, i in peers_waiting)
    if not peers:
        peers = "its peers have finished"
    return _error(program, rank, instruction, f"it waits for ever: {peers}")


def _error(program: "Program", rank: int, i: Instruction, why: str) -> UserError:
    """The error at an instruction, with the op that it is or belongs to marked in the grid."""
    # The grid shows ops. An instruction of another kind is shown at the op that it follows.
    mark = None
    if i.step is not None and i.step in program.steps:
        if i.action.computes:
            op = i.op
        else:
            # An instruction of all micro-batches belongs to the backward of the last one.
            microbatch = i.microbatch
            if microbatch is None:
                microbatch = program.schedule.n_microbatches - 1
            follows_forward = i.buffer == ACTIVATION and i.action != FREE
            op = Op(
                Kind.FORWARD if follows_forward else Kind.BACKWARD, i.stage, microbatch
            )
        mark = op, i.step - program.first_step
    location = f"rank {rank}, slot {program.slot(i)}, {i}"
    return _marked(f"{location}: {why}", program.schedule, mark)


def _marked(
    why: str, schedule: "Schedule", mark: tuple[Op, int] | None = None
) -> UserError:
    """The error, with the grid of ``schedule`` with brackets around ``mark`` = (op, step)."""
    steps = mark[1] + 1 if mark else 1
    return UserError(
        f"{why}\n{grid.render(schedule.timing, schedule.layout, steps, mark=mark)}"
    )


class _Machine:
    """Carries out instructions on what ranks hold: ``by_action()[action](rank, instruction)``.

    Attributes:
        memories: what each rank holds.
        promised: of each op to come, by kind, stage, micro-batch and step: tick, weight version
            and the buffer that it reads instead.
        misplaced: instructions at wrong ticks, and why.
        meeting_tick: tick of a send, or of a collective's root. The replay yields its peers next.
        sum_in_flight: sum of a send, until its receive, which the replay yields next.
        all_microbatches: the sum of gradients of all micro-batches.
    """

    def __init__(self, program: "Program") -> None:
        self.program = program
        self.schedule = program.schedule
        self.last_stage = self.schedule.n_stages - 1
        self.memories = [RankMemory() for _ in program.ranks]
        self.promised = dict(promises(program))
        self.misplaced: list[tuple[int, Instruction, str]] = []
        self.meeting_tick = 0
        self.sum_in_flight = 0
        self.all_microbatches = (1 << self.schedule.n_microbatches) - 1
        for stage in range(self.schedule.n_stages):
            versions = self.schedule.versions(stage, program.first_step)
            for rank in self.schedule.first_holders(stage, program.first_step):
                self.memories[rank].weights |= {
                    (stage, version) for version in versions
                }

    def by_action(self) -> list[Callable[[int, Instruction], None]]:
        """Return the methods by action, in the order of Action."""
        # Not kept here: bound methods of an object that it keeps make a reference cycle.
        return [
            self._forward,
            *[self._backward] * (len(Kind) - 1),
            self._update,
            self._predict,
            *[self._communicate] * (FREE - SEND),
            self._free,
        ]

    def _forward(self, rank: int, i: Instruction) -> None:
        self._keep_promise(rank, i)
        memory = self.memories[rank]
        _, _, stage, microbatch, step, *_ = i
        if stage > 0:
            memory.take_boundary((ACTIVATION, stage - 1, microbatch, step))
        if stage < self.last_stage:
            memory.boundaries.add((ACTIVATION, stage, microbatch, step))
        memory.activations.add((stage, microbatch, step))

    def _backward(self, rank: int, i: Instruction) -> None:
        self._keep_promise(rank, i)
        memory = self.memories[rank]
        _, action, stage, microbatch, step, *_ = i
        key = (stage, microbatch, step)
        if key not in memory.activations:
            raise RefusedError(
                "its activations are not there: never made here, or freed"
            )
        if action != BACKWARD_WEIGHT:
            if stage < self.last_stage:
                memory.take_boundary((ACTIVATION_GRADIENT, stage + 1, microbatch, step))
            if stage > 0:
                memory.boundaries.add((ACTIVATION_GRADIENT, stage, microbatch, step))
        # The gradient of the parameters joins the sum with a whole backward, or its second half.
        if action == BACKWARD_INPUT:
            memory.halves.add(key)
        else:
            memory.add_to_sum((stage, step), 1 << (microbatch or 0))

    def _keep_promise(self, rank: int, i: Instruction) -> None:
        """Let an op read its weights; refuse it if the schedule promises another op or others."""
        tick, action, stage, microbatch, step, version, buffer, _ = i
        # Taken out, so that an op that is done twice is found at once, and one that is never done
        # at the end.
        promise = self.promised.pop((action, stage, microbatch, step), None)
        if promise != (tick, version, buffer):
            self._check_promise(rank, i, promise)
        memory = self.memories[rank]
        # Before its weights: new ones may come between the halves.
        if action == BACKWARD_WEIGHT:
            key = (stage, microbatch, step)
            if key not in memory.halves:
                raise RefusedError(
                    "the first half of this backward has not run on this rank"
                )
            memory.halves.remove(key)
        # Most ops read one version; `reads` makes a tuple of what a corrected one reads.
        for weights in i.reads if buffer else ((stage, version),):
            memory.read_weights(weights)

    def _check_promise(
        self, rank: int, i: Instruction, promise: Promise | None
    ) -> None:
        """Refuse an op that the schedule does not have, or promises on other weights."""
        if promise is None:
            if i.op in self.schedule.at(i.step or 0).timing.starts:
                raise RefusedError("it has been done before")
            raise RefusedError("the schedule has no such op")
        tick, version, buffer = promise
        if (version, buffer) != (i.version, i.buffer):
            correction = _CORRECTED.get(buffer, "")
            raise RefusedError(
                f"the schedule promises weight version {version}{correction}"
            )
        # A wrong tick is no error yet: an order may be verified without its ticks.
        if tick != i.tick:
            self.misplaced.append(
                (rank, i, f"it is at tick {i.tick}, and its op at {tick}")
            )

    def _update(self, rank: int, i: Instruction) -> None:
        memory = self.memories[rank]
        # Updates may not leave a step out: this makes version t + 1 from version t and the gradient
        # of step t, as the contract of numerics says.
        if i.step is None or i.version != i.step + 1:
            raise RefusedError(
                f"the update of step {i.step} makes the version after it"
            )
        # The sum is a set of micro-batches, one bit each.
        missing = self.all_microbatches & ~memory.sums.pop((i.stage, i.step), 0)
        if missing:
            lacking = [
                m for m in range(self.schedule.n_microbatches) if missing >> m & 1
            ]
            raise RefusedError(f"the gradient lacks micro-batches {lacking}")
        memory.read_weights((i.stage, i.step))
        memory.weights.add((i.stage, i.version))

    def _predict(self, rank: int, i: Instruction) -> None:
        op = Op(Kind.FORWARD, i.stage, 0)
        if self.schedule.read_by(op, i.version or 0, i.step or 0) != PREDICTION:
            raise RefusedError(
                f"the schedule predicts nothing from version {i.version}"
            )
        for weights in i.reads:
            self.memories[rank].read_weights(weights)
        self.memories[rank].add_weights(i)

    def _free(self, rank: int, i: Instruction) -> None:
        memory = self.memories[rank]
        if i.buffer == ACTIVATION:
            buffers: set = memory.activations
            key: tuple = i[2:5]
        else:
            buffers = memory.weights
            key = i.weights
        if key not in buffers:
            raise RefusedError(
                "there is nothing to free: never held here, or freed before"
            )
        buffers.remove(key)

    def _communicate(self, rank: int, i: Instruction) -> None:
        tick, action, stage, microbatch, step, _, buffer, peers = i
        # The replay yields a send before its receive, and a collective's root before its peers.
        if action == SEND or peers[0] == rank:
            self.meeting_tick = tick
        elif tick != self.meeting_tick:
            why = f"it is at tick {tick}, and its peer's at {self.meeting_tick}"
            self.misplaced.append((rank, i, why))
        memory = self.memories[rank]
        if buffer == GRADIENT:
            self._reduce(rank, i)
        elif buffer == WEIGHTS:
            if i.leaves(rank):
                memory.add_weights(i)
            else:
                memory.read_weights(i.weights)
        else:
            boundary = (buffer or ACTIVATION, stage, microbatch, step)
            if action == SEND:
                memory.take_boundary(boundary)
            else:
                memory.boundaries.add(boundary)

    def _reduce(self, rank: int, i: Instruction) -> None:
        memory = self.memories[rank]
        key = (i.stage, i.step)
        if i.action == SEND:
            if key not in memory.sums:
                raise RefusedError("there is no sum to hand on")
            # Handed on, not copied: a second send of the sum is refused, since it would count
            # gradients twice.
            self.sum_in_flight = memory.sums.pop(key)
        elif i.action == RECV:
            memory.add_to_sum(key, self.sum_in_flight)
        elif rank == i.peers[0]:
            # The root carries out the whole collective; its peers, which come next, do nothing.
            for peer in i.peers:
                if key not in self.memories[peer].sums:
                    raise RefusedError(f"rank {peer} has no sum to give")
            for peer in i.peers[1:]:
                memory.add_to_sum(key, self.memories[peer].sums.pop(key))
            if i.action == ALL_REDUCE:
                for peer in i.peers[1:]:
                    self.memories[peer].sums[key] = memory.sums[key]

    def check_end(self) -> None:
        """Check that every op ran and only the newest weights remain."""
        schedule, steps = self.schedule, self.program.steps
        for *op, step in self.promised:
            why = f"at the end: {Op(*op)} of step {step} is never done"
            raise _marked(why, schedule, (Op(*op), step - steps.start))
        newest = {(stage, steps.stop) for stage in range(schedule.n_stages)}
        for stage, owner in enumerate(schedule.at(steps.stop - 1).owners):
            if (stage, steps.stop) not in self.memories[owner].weights:
                loss = f"rank {owner} has lost the newest version, {steps.stop}, of stage {stage}"
                raise _marked(f"at the end: {loss}", schedule)
        # What is left but the newest weights is a leak, or a result that nobody has used.
        for rank, memory in enumerate(self.memories):
            for missing in self._missing_frees(rank, memory.weights - newest):
                raise _error(self.program, rank, missing, "it is missing")
            if memory.boundaries or memory.sums:
                unused = [*memory.boundaries, *memory.sums]
                raise _marked(
                    f"at the end: rank {rank} has unused results {unused}", schedule
                )

    def _missing_frees(
        self, rank: int, weights: set[WeightsKey]
    ) -> Iterator[Instruction]:
        """Yield the frees that the rank lacks, of ``weights`` and of activations."""
        timing = self.schedule.timing
        for stage, microbatch, step in self.memories[rank].activations:
            step_start = ((step or 0) - self.program.first_step) * timing.period
            tick = step_start + timing.gradient_end(stage, microbatch or 0)
            yield Instruction(tick, FREE, stage, microbatch, step, None, ACTIVATION)
        for key in weights:
            stage, version, *prediction_step = key
            tick = 0
            for i in self.program.ranks[rank]:
                tick = max(tick, _end_of_use(i, rank, timing.ticks_per_slot, key))
            if prediction_step:
                (step,) = prediction_step
                yield Instruction(tick, FREE, stage, None, step, version, PREDICTION)
            else:
                yield Instruction(tick, FREE, stage, None, None, version, WEIGHTS)


def _end_of_use(i: Instruction, rank: int, slot: int, weights: WeightsKey) -> int:
    """Return the tick at which ``rank`` has used the weights in an instruction; 0 if unused."""
    if i.action == UPDATE:  # it begins with the version before
        return i.tick if weights == (i.stage, i.step) else 0
    if i.action.communicates and i.leaves(rank):
        return 0
    if i.action == FREE or weights not in i.reads:
        return 0
    return i.tick + slot if i.action.computes else i.tick

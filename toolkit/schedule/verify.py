"""Prove that a program is complete, consistent and free of deadlock, by replaying it once.

Linear in the number of instructions.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.schedule import grid
from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    ALL_REDUCE,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    BROADCAST,
    COMPENSATED,
    FORWARD,
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
    Op,
    WeightsKey,
    collector_paused,
)
from toolkit.schedule.replay import DeadlockError, replay

if TYPE_CHECKING:
    from toolkit.schedule.program import Program
    from toolkit.schedule.schedule import Schedule

_Key = tuple[int, int | None, int | None]  # stage, micro-batch, step

_MESSAGES = (SEND, RECV)
_SUMS = (ALL_REDUCE, REDUCE)
_CORRECTED: dict[Buffer | None, str] = {
    PREDICTION: ", and to predict from it",
    COMPENSATED: ", and to compensate its gradient",
}


# The fields that an instruction has: m micro-batch, t step, v version.
_FIELDS: dict[tuple[Action, Buffer | None], str] = {
    **dict.fromkeys(product(map(Action, Kind), (None, *_CORRECTED)), "mtv"),
    (UPDATE, None): "tv",
    (PREDICT, PREDICTION): "tv",
    **dict.fromkeys(product(_MESSAGES, (ACTIVATION, ACTIVATION_GRADIENT)), "mt"),
    **dict.fromkeys(product((*_MESSAGES, *_SUMS), (GRADIENT,)), "t"),
    **dict.fromkeys(product((*_MESSAGES, BROADCAST, FREE), (WEIGHTS,)), "v"),
    (FREE, ACTIVATION): "mt",
    (FREE, PREDICTION): "tv",
}
_FORMS = {  # with which of them are missing
    (*form, *(letter not in fields for letter in "mtv")) for form, fields in _FIELDS.items()
}


class _RefusedError(Exception):
    """Why an instruction cannot be carried out."""


class _Rank:
    """What one rank holds. A sum of gradients is the set of its micro-batches, as bits."""

    def __init__(self) -> None:
        self.activations: set[_Key] = set()
        self.boundaries: set[tuple[Buffer, int, int | None, int | None]] = set()
        self.halves: set[_Key] = set()
        self.sums: dict[tuple[int, int | None], int] = {}
        self.weights: set[WeightsKey] = set()


def verify(program: "Program") -> None:
    """See :meth:`Program.verify`."""
    misplaced = verify_order(program)
    for rank, instructions in enumerate(program.ranks):
        for before, instruction in pairwise(instructions):
            if instruction.tick < before.tick:
                why = f"it stands after tick {before.tick}"
                raise _error(program, rank, instruction, why)
    if misplaced:
        rank, instruction, why = misplaced[0]
        raise _error(program, rank, instruction, why)


def verify_order(program: "Program") -> list[tuple[int, Instruction, str]]:
    """Verify all but the ticks; return the instructions that stand at wrong ones, and why."""
    _check_forms(program)
    with collector_paused():
        check = _Check(program)
        try:
            for rank, instruction in replay(program.ranks):
                check.do[instruction.action](rank, instruction)
        except _RefusedError as refusal:
            raise _error(program, rank, instruction, str(refusal)) from None
        except DeadlockError as deadlock:
            # Name the rank that has waited longest.
            waiting = sorted(deadlock.waiting.items(), key=lambda item: (item[1].tick, item[0]))
            (rank, instruction), *peers_waiting = waiting
            peers = "; ".join(f"rank {peer} waits at {i}" for peer, i in peers_waiting)
            if not peers:
                peers = "its peers have finished"
            raise _error(program, rank, instruction, f"it waits for ever: {peers}") from None
    check.end()
    return check.misplaced


def _error(program: "Program", rank: int, i: Instruction, why: str) -> UserError:
    """The error at an instruction, with the op that it is or belongs to marked in the grid."""
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
            op = Op(Kind.FORWARD if follows_forward else Kind.BACKWARD, i.stage, microbatch)
        mark = op, i.step - program.first_step
    where = f"rank {rank}, slot {program.slot(i)}, {i}"
    return _marked(f"{where}: {why}", program.schedule, mark)


def _marked(why: str, schedule: "Schedule", mark: tuple[Op, int] | None = None) -> UserError:
    """The error, with the grid of ``schedule`` and ``mark`` = (op, step) in brackets."""
    steps = mark[1] + 1 if mark else 1
    return UserError(f"{why}\n{grid.render(schedule.timing, schedule.layout, steps, mark=mark)}")


def _check_forms(program: "Program") -> None:
    """Refuse what is no instruction of any program on these ranks, stages and steps."""
    schedule = program.schedule
    ranks = range(len(program.ranks))
    stages = {*range(schedule.n_stages)}
    microbatches = {None, *range(schedule.n_microbatches)}
    steps = {None, *program.steps}
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            _, action, stage, microbatch, step, version, buffer, peers = i
            form = (action, buffer, microbatch is None, step is None, version is None)
            if form not in _FORMS:
                raise _error(program, rank, i, "there is no instruction of these fields")
            if stage not in stages or microbatch not in microbatches or step not in steps:
                raise _error(program, rank, i, "the program has no such stage, micro-batch or step")
            if action in _MESSAGES:
                fits = len(peers) == 1 and peers[0] != rank and peers[0] in ranks
            elif action.communicates:
                fits = rank in peers and len({*peers}.intersection(ranks)) == len(peers)
            else:
                fits = not peers
            if not fits:
                raise _error(program, rank, i, "there are no such peers")


class _Check:
    """Carries out instructions on what ranks hold: ``do[action](rank, instruction)``.

    Attributes:
        ranks: what each rank holds.
        promised: of each op to come, by kind, stage, micro-batch and step: tick, weight version
            and the buffer that it reads instead.
        misplaced: instructions at wrong ticks, and why.
        met: tick of a send, or of a collective's root. The replay yields its peers next.
        in_flight: sum of gradients of a send, until its receive, which the replay yields next.
        every: the sum of gradients of all micro-batches.
    """

    def __init__(self, program: "Program") -> None:
        self.program = program
        self.schedule = program.schedule
        self.ranks = [_Rank() for _ in program.ranks]
        self.promised = dict(_promises(program))
        self.misplaced: list[tuple[int, Instruction, str]] = []
        self.met = 0
        self.in_flight = 0
        self.every = (1 << self.schedule.n_microbatches) - 1
        for stage in range(self.schedule.n_stages):
            versions = self.schedule.versions(stage, program.first_step)
            for rank in self.schedule.first_holders(stage, program.first_step):
                self.ranks[rank].weights |= {(stage, version) for version in versions}
        self.do: list[Callable[[int, Instruction], None]] = [
            *[self._compute] * len(Kind),
            self._update,
            self._predict,
            *[self._communicate] * (FREE - SEND),
            self._free,
        ]

    def _compute(self, rank: int, i: Instruction) -> None:
        state = self.ranks[rank]
        _, action, stage, microbatch, step, version, buffer, _ = i
        key = (stage, microbatch, step)
        self._keep_promise(rank, i)
        if action == BACKWARD_WEIGHT:  # before its weights: new ones may come between the halves
            if key not in state.halves:
                raise _RefusedError("the first half of this backward has not been done here")
            state.halves.remove(key)
        # Most ops read one version; `reads` makes a tuple of what a corrected one reads.
        for weights in i.reads if buffer else ((stage, version),):
            _reads(state, weights)
        if action == FORWARD:
            if stage > 0:
                _take(state.boundaries, (ACTIVATION, stage - 1, microbatch, step))
            if stage < self.schedule.n_stages - 1:
                state.boundaries.add((ACTIVATION, stage, microbatch, step))
            state.activations.add(key)
            return
        if key not in state.activations:
            raise _RefusedError("its activations are not there: never made here, or freed")
        if action != BACKWARD_WEIGHT:
            if stage < self.schedule.n_stages - 1:
                _take(state.boundaries, (ACTIVATION_GRADIENT, stage + 1, microbatch, step))
            if stage > 0:
                state.boundaries.add((ACTIVATION_GRADIENT, stage, microbatch, step))
        if action == BACKWARD_INPUT:
            state.halves.add(key)
        else:
            _merge(state, (stage, step), 1 << (microbatch or 0))

    def _keep_promise(self, rank: int, i: Instruction) -> None:
        """Refuse an op that the schedule does not have, or promises on other weights."""
        promise = self.promised.pop(i[1:5], None)
        if promise is None:
            is_op = i.op in self.schedule.at(i.step or 0).timing.starts
            raise _RefusedError(
                "it has been done before" if is_op else "the schedule has no such op"
            )
        tick, version, buffer = promise
        if (version, buffer) != (i.version, i.buffer):
            correction = _CORRECTED.get(buffer, "")
            raise _RefusedError(f"the schedule promises weight version {version}{correction}")
        if tick != i.tick:
            self.misplaced.append((rank, i, f"it is at tick {i.tick}, and its op at {tick}"))

    def _update(self, rank: int, i: Instruction) -> None:
        state = self.ranks[rank]
        if i.step is None or i.version != i.step + 1:
            raise _RefusedError(f"the update of step {i.step} makes the version after it")
        missing = self.every & ~state.sums.pop((i.stage, i.step), 0)
        if missing:
            lacking = [m for m in range(self.schedule.n_microbatches) if missing >> m & 1]
            raise _RefusedError(f"the gradient lacks micro-batches {lacking}")
        _reads(state, (i.stage, i.step))
        state.weights.add((i.stage, i.version))

    def _predict(self, rank: int, i: Instruction) -> None:
        op = Op(Kind.FORWARD, i.stage, 0)
        if self.schedule.read_by(op, i.version or 0, i.step or 0) != PREDICTION:
            raise _RefusedError(f"the schedule predicts nothing from version {i.version}")
        for weights in i.reads:
            _reads(self.ranks[rank], weights)
        self._add_weights(rank, i)

    def _free(self, rank: int, i: Instruction) -> None:
        state = self.ranks[rank]
        if i.buffer == ACTIVATION:
            buffers: set = state.activations
            key: tuple = i[2:5]
        else:
            buffers = state.weights
            key = i.weights
        if key not in buffers:
            raise _RefusedError("there is nothing to free: never held here, or freed before")
        buffers.remove(key)

    def _communicate(self, rank: int, i: Instruction) -> None:
        tick, action, stage, microbatch, step, _, buffer, peers = i
        if action == SEND or peers[0] == rank:
            self.met = tick
        elif tick != self.met:
            why = f"it is at tick {tick}, and its peer's at {self.met}"
            self.misplaced.append((rank, i, why))
        if buffer == GRADIENT:
            self._reduce(rank, i)
        elif buffer == WEIGHTS:
            if i.leaves(rank):
                self._add_weights(rank, i)
            else:
                _reads(self.ranks[rank], i.weights)
        else:
            boundary = (buffer or ACTIVATION, stage, microbatch, step)
            if action == SEND:
                _take(self.ranks[rank].boundaries, boundary)
            else:
                self.ranks[rank].boundaries.add(boundary)

    def _add_weights(self, rank: int, i: Instruction) -> None:
        weights = self.ranks[rank].weights
        if i.weights in weights:
            kind = "prediction" if i.buffer == PREDICTION else "version"
            raise _RefusedError(f"the rank holds that {kind} already")
        weights.add(i.weights)

    def _reduce(self, rank: int, i: Instruction) -> None:
        state = self.ranks[rank]
        key = (i.stage, i.step)
        if i.action == SEND:
            if key not in state.sums:
                raise _RefusedError("there is no sum to hand on")
            self.in_flight = state.sums.pop(key)
        elif i.action == RECV:
            _merge(state, key, self.in_flight)
        elif rank == i.peers[0]:
            for peer in i.peers:
                if key not in self.ranks[peer].sums:
                    raise _RefusedError(f"rank {peer} has no sum to give")
            for peer in i.peers[1:]:
                _merge(state, key, self.ranks[peer].sums.pop(key))
            if i.action == ALL_REDUCE:
                for peer in i.peers[1:]:
                    self.ranks[peer].sums[key] = state.sums[key]

    def end(self) -> None:
        """Check that every op ran and only the newest weights remain."""
        schedule, steps = self.schedule, self.program.steps
        for *op, step in self.promised:
            why = f"at the end: {Op(*op)} of step {step} is never done"
            raise _marked(why, schedule, (Op(*op), step - steps.start))
        newest = {(stage, steps.stop) for stage in range(schedule.n_stages)}
        for stage, owner in enumerate(schedule.at(steps.stop - 1).owners):
            if (stage, steps.stop) not in self.ranks[owner].weights:
                loss = f"rank {owner} has lost the newest version, {steps.stop}, of stage {stage}"
                raise _marked(f"at the end: {loss}", schedule)
        for rank, state in enumerate(self.ranks):
            for missing in self._missing_frees(rank, state.weights - newest):
                raise _error(self.program, rank, missing, "it is missing")
            if state.boundaries or state.sums:
                unused = [*state.boundaries, *state.sums]
                raise _marked(f"at the end: rank {rank} has unused results {unused}", schedule)

    def _missing_frees(self, rank: int, weights: set[WeightsKey]) -> Iterator[Instruction]:
        """Yield the frees that the rank lacks, of ``weights`` and of activations."""
        timing = self.schedule.timing
        for stage, microbatch, step in self.ranks[rank].activations:
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


def _promises(program: "Program") -> Iterator[tuple[tuple, tuple[int, int, Buffer | None]]]:
    """Yield each op, as kind, stage, micro-batch and step, and its tick, version and buffer."""
    first_steps = [program.first_step, *program.schedule.changes(program.steps)]
    spans = pairwise([*first_steps, program.steps.stop])
    for first_tick, (first_step, stop) in zip((0, *program.changes), spans, strict=True):
        schedule = program.schedule.at(first_step)
        is_corrected = schedule.corrected.kind != "none"
        step_start = first_tick
        for step in range(first_step, stop):
            for op, op_start in schedule.timing.starts.items():
                version = schedule.version(op.stage, op.microbatch, step)
                buffer = schedule.read_by(op, version, step) if is_corrected else None
                yield (*op, step), (step_start + op_start, version, buffer)
            step_start += schedule.timing.period


def _end_of_use(i: Instruction, rank: int, slot: int, weights: WeightsKey) -> int:
    """Return the tick at which ``rank`` has used the weights in an instruction; 0 if unused."""
    if i.action == UPDATE:
        return i.tick if weights == (i.stage, i.step) else 0
    if i.action.communicates and i.leaves(rank):
        return 0
    if i.action == FREE or weights not in i.reads:
        return 0
    return i.tick + slot if i.action.computes else i.tick


def _reads(state: _Rank, weights: WeightsKey) -> None:
    if weights not in state.weights:
        stage, version, *prediction_step = weights
        name = f"version {version}"
        if prediction_step:
            name = f"the prediction from {name}"
        raise _RefusedError(f"the rank does not hold {name} of stage {stage}")


def _merge(state: _Rank, key: tuple[int, int | None], microbatches: int) -> None:
    sums = state.sums.get(key, 0)
    if sums & microbatches:
        raise _RefusedError("a micro-batch's gradient is counted twice")
    state.sums[key] = sums | microbatches


def _take(boundaries: set, key: tuple[Buffer, int, int | None, int | None]) -> None:
    if key not in boundaries:
        buffer, stage, microbatch, _ = key
        raise _RefusedError(
            f"the {buffer.label} of stage {stage}, micro-batch {microbatch} is not there"
        )
    boundaries.remove(key)

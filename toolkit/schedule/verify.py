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
        ticks = [i.tick for i in instructions]
        for at, (before, tick) in enumerate(pairwise(ticks) if ticks != sorted(ticks) else ()):
            if tick < before:
                raise _error(program, rank, instructions[at + 1], f"it stands after tick {before}")
    for rank, instruction, why in misplaced[:1]:
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
            waiting = sorted(deadlock.waiting.items(), key=lambda item: (item[1].tick, item[0]))
            (rank, instruction), *others = waiting
            stuck = "; ".join(f"rank {other} waits at {i}" for other, i in others)
            why = f"it waits for ever: {stuck or 'its peers have finished'}"
            raise _error(program, rank, instruction, why) from None
    check.end()
    return check.misplaced


def _error(program: "Program", rank: int, i: Instruction, why: str) -> UserError:
    """The error at an instruction, with the op that it is or belongs to marked in the grid."""
    mark = None
    if i.step is not None and i.step in program.steps:
        forward = i.buffer == ACTIVATION and i.action != FREE
        m = program.schedule.n_microbatches - 1 if i.microbatch is None else i.microbatch
        op = Op(Kind.FORWARD if forward else Kind.BACKWARD, i.stage, m)
        mark = i.op if i.action.computes else op, i.step - program.first_step
    where = f"rank {rank}, slot {program.slot(i)}, {i}"
    return _marked(f"{where}: {why}", program.schedule, mark)


def _marked(why: str, schedule: "Schedule", mark: tuple[Op, int] | None = None) -> UserError:
    """The error, with the grid of ``schedule`` and ``mark`` = (op, step) in brackets."""
    steps = mark[1] + 1 if mark else 1
    return UserError(f"{why}\n{grid.render(schedule.timing, schedule.layout, steps, mark=mark)}")


def _check_forms(program: "Program") -> None:
    """Refuse what is no instruction of any program on these ranks, stages and steps."""
    schedule, ranks = program.schedule, range(len(program.ranks))
    microbatches = {None, *range(schedule.n_microbatches)}
    stages, steps = {*range(schedule.n_stages)}, {None, *program.steps}
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            _, action, stage, m, step, version, buffer, peers = i
            if (action, buffer, m is None, step is None, version is None) not in _FORMS:
                raise _error(program, rank, i, "there is no instruction of these fields")
            if stage not in stages or m not in microbatches or step not in steps:
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
    """What ranks hold, and what they do with it: ``do[action](rank, instruction)``."""

    def __init__(self, program: "Program") -> None:
        self.program = program
        self.schedule = program.schedule
        self.ranks = [_Rank() for _ in program.ranks]
        # Of each op to come, by (kind, stage, micro-batch, step): tick, weight version, buffer.
        self.promised = dict(_promises(program))
        self.misplaced: list[tuple[int, Instruction, str]] = []  # at wrong ticks
        self.met = 0  # the tick of a send, or of a collective's root; replay yields the others next
        self.in_flight = 0  # the sum of a send, until its receive, which replay yields next
        self.every = (1 << self.schedule.n_microbatches) - 1
        for j in range(self.schedule.n_stages):
            given = self.schedule.versions(j, program.first_step)
            for rank in self.schedule.first_holders(j, program.first_step):
                self.ranks[rank].weights |= {(j, version) for version in given}
        self.do: list[Callable[[int, Instruction], None]] = [
            *[self._compute] * len(Kind),
            self._update,
            self._predict,
            *[self._communicate] * (FREE - SEND),
            self._free,
        ]

    def _compute(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        tick, action, j, m, step, version, buffer, _ = i
        key = (j, m, step)
        if (promised := self.promised.pop(i[1:5], None)) is None:
            known = i.op in self.schedule.at(step or 0).timing.starts
            raise _RefusedError(
                "it has been done before" if known else "the schedule has no such op"
            )
        if promised != (tick, version, buffer):
            due, promise, instead = promised
            if (promise, instead) != (version, buffer):
                also = _CORRECTED.get(instead, "")
                raise _RefusedError(f"the schedule promises weight version {promise}{also}")
            self.misplaced.append((rank, i, f"it is at tick {tick}, and its op at {due}"))
        if action == BACKWARD_WEIGHT:  # before its weights: new ones may come between the halves
            if key not in here.halves:
                raise _RefusedError("the first half of this backward has not been done here")
            here.halves.remove(key)
        for weights in i.reads if buffer else ((j, version),):
            _reads(here, weights)
        if action == FORWARD:
            if j > 0:
                _take(here.boundaries, (ACTIVATION, j - 1, m, step))
            if j < self.schedule.n_stages - 1:
                here.boundaries.add((ACTIVATION, j, m, step))
            here.activations.add(key)
            return
        if key not in here.activations:
            raise _RefusedError("its activations are not there: never made here, or freed")
        if action != BACKWARD_WEIGHT:
            if j < self.schedule.n_stages - 1:
                _take(here.boundaries, (ACTIVATION_GRADIENT, j + 1, m, step))
            if j > 0:
                here.boundaries.add((ACTIVATION_GRADIENT, j, m, step))
        if action == BACKWARD_INPUT:
            here.halves.add(key)
        else:
            _merge(here, (j, step), 1 << (m or 0))

    def _update(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        if i.step is None or i.version != i.step + 1:
            raise _RefusedError(f"the update of step {i.step} makes the version after it")
        if missing := self.every & ~here.sums.pop((i.stage, i.step), 0):
            lacking = [m for m in range(self.schedule.n_microbatches) if missing >> m & 1]
            raise _RefusedError(f"the gradient lacks micro-batches {lacking}")
        _reads(here, (i.stage, i.step))
        here.weights.add((i.stage, i.version))

    def _predict(self, rank: int, i: Instruction) -> None:
        op = Op(Kind.FORWARD, i.stage, 0)
        if self.schedule.read_by(op, i.version or 0, i.step or 0) != PREDICTION:
            raise _RefusedError(f"the schedule predicts nothing from version {i.version}")
        for weights in i.reads:
            _reads(self.ranks[rank], weights)
        self._gains(rank, i)

    def _free(self, rank: int, i: Instruction) -> None:
        here = self.ranks[rank]
        held: set = here.activations if i.buffer == ACTIVATION else here.weights
        key = i[2:5] if held is here.activations else i.weights
        if key not in held:
            raise _RefusedError("there is nothing to free: never held here, or freed before")
        held.remove(key)

    def _communicate(self, rank: int, i: Instruction) -> None:
        tick, action, j, m, step, _, buffer, peers = i
        if action == SEND or peers[0] == rank:
            self.met = tick
        elif tick != self.met:
            why = f"it is at tick {tick}, and its peer's at {self.met}"
            self.misplaced.append((rank, i, why))
        if buffer == GRADIENT:
            self._gradient(rank, i)
        elif buffer == WEIGHTS:
            if i.leaves(rank):
                self._gains(rank, i)
            else:
                _reads(self.ranks[rank], i.weights)
        elif action == SEND:
            _take(self.ranks[rank].boundaries, (buffer or ACTIVATION, j, m, step))
        else:
            self.ranks[rank].boundaries.add((buffer or ACTIVATION, j, m, step))

    def _gains(self, rank: int, i: Instruction) -> None:
        held = self.ranks[rank].weights
        if i.weights in held:
            what = "prediction" if i.buffer == PREDICTION else "version"
            raise _RefusedError(f"the rank holds that {what} already")
        held.add(i.weights)

    def _gradient(self, rank: int, i: Instruction) -> None:
        here, key = self.ranks[rank], (i.stage, i.step)
        if i.action == SEND:
            if key not in here.sums:
                raise _RefusedError("there is no sum to hand on")
            self.in_flight = here.sums.pop(key)
        elif i.action == RECV:
            _merge(here, key, self.in_flight)
        elif rank == i.peers[0]:
            for peer in i.peers:
                if key not in self.ranks[peer].sums:
                    raise _RefusedError(f"rank {peer} has no sum to give")
            for peer in i.peers[1:]:
                _merge(here, key, self.ranks[peer].sums.pop(key))
            if i.action == ALL_REDUCE:
                for peer in i.peers[1:]:
                    self.ranks[peer].sums[key] = here.sums[key]

    def end(self) -> None:
        """Check that every op ran and only the newest weights remain."""
        schedule, steps = self.schedule, self.program.steps
        for *op, step in self.promised:
            why = f"at the end: {Op(*op)} of step {step} is never done"
            raise _marked(why, schedule, (Op(*op), step - steps.start))
        newest = {(j, steps.stop) for j in range(schedule.n_stages)}
        for j, owner in enumerate(schedule.at(steps.stop - 1).owners):
            if (j, steps.stop) not in self.ranks[owner].weights:
                lost = f"rank {owner} has lost the newest version, {steps.stop}, of stage {j}"
                raise _marked(f"at the end: {lost}", schedule)
        for rank, here in enumerate(self.ranks):
            for missing in self._unfreed(rank, here.weights - newest):
                raise _error(self.program, rank, missing, "it is missing")
            if here.boundaries or here.sums:
                left = [*here.boundaries, *here.sums]
                raise _marked(f"at the end: rank {rank} has unused results {left}", schedule)

    def _unfreed(self, rank: int, weights: set[WeightsKey]) -> Iterator[Instruction]:
        """The frees that the rank lacks, of ``weights`` and of activations."""
        timing, first = self.schedule.timing, self.program.first_step
        own = self.program.ranks[rank]
        for j, m, t in self.ranks[rank].activations:
            tick = ((t or 0) - first) * timing.period + timing.gradient_end(j, m or 0)
            yield Instruction(tick, FREE, j, m, t, None, ACTIVATION)
        for key in weights:
            j, version, *of = key
            step, buffer = (of[0], PREDICTION) if of else (None, WEIGHTS)
            ends = (_end_of_use(i, rank, timing.ticks_per_slot, key) for i in own)
            tick = max(ends, default=0)
            yield Instruction(tick, FREE, j, None, step, version, buffer)


def _promises(program: "Program") -> Iterator[tuple[tuple, tuple[int, int, Buffer | None]]]:
    """Yield each op, as kind, stage, micro-batch and step, and its tick, version and buffer."""
    begins = [program.first_step, *program.schedule.changes(program.steps)]
    spans = pairwise([*begins, program.steps.stop])
    for begin, (first, stop) in zip((0, *program.changes), spans, strict=True):
        schedule = program.schedule.at(first)
        corrected = schedule.corrected.kind != "none"
        for step in range(first, stop):
            for op, start in schedule.timing.starts.items():
                version = schedule.version(op.stage, op.microbatch, step)
                buffer = schedule.read_by(op, version, step) if corrected else None
                yield (*op, step), (begin + start, version, buffer)
            begin += schedule.timing.period


def _end_of_use(i: Instruction, rank: int, slot: int, weights: WeightsKey) -> int:
    """The tick at which ``rank`` has used the weights in an instruction; 0 if it does not."""
    if i.action == UPDATE:
        return i.tick if weights == (i.stage, i.step) else 0
    if i.action.communicates and i.leaves(rank):
        return 0
    used = i.action != FREE and weights in i.reads
    return (i.tick + slot if i.action.computes else i.tick) if used else 0


def _reads(here: _Rank, weights: WeightsKey) -> None:
    if weights not in here.weights:
        stage, version, *predicted = weights
        what = f"the prediction from version {version}" if predicted else f"version {version}"
        raise _RefusedError(f"the rank does not hold {what} of stage {stage}")


def _merge(here: _Rank, key: tuple[int, int | None], microbatches: int) -> None:
    if here.sums.get(key, 0) & microbatches:
        raise _RefusedError("a micro-batch's gradient is counted twice")
    here.sums[key] = here.sums.get(key, 0) | microbatches


def _take(boundaries: set, key: tuple[Buffer, int, int | None, int | None]) -> None:
    if key not in boundaries:
        what = key[0].label
        raise _RefusedError(f"the {what} of stage {key[1]}, micro-batch {key[2]} is not there")
    boundaries.remove(key)

"""From ops to instructions: the schedule says what computes when, lowering infers the rest.

Everything inferred follows from six rules.

1. *Boundaries.* Where stage j and the stage after (before) it sit on different ranks, the output
   (the gradient of the input) is sent when the op has ended.
2. *Gradients.* A rank sums what it computed. Sums that are complete on several ranks at the same
   moment meet in a collective: an all-reduce, or, where the state is sharded, a reduction to the
   owner. Otherwise a running sum is handed from rank to rank in the order in which they finish,
   or round the stage's ring if chains are rotated, and ends at the stage's owner. If the state
   circulates, a rank hands the sum on after each of its micro-batches, and keeps no share.
3. *Updates.* The owner updates; after an all-reduce every rank does, from the same sum.
4. *Weights.* A version is handed on to the ranks that read it, in the order in which they first
   need it, or round the ring; among those that need it when the owner does, from the owner on.
   Where the state is sharded a rank keeps it for one op only and hands it on after that; ranks that
   need it at the same moment get it by a broadcast from the owner. If the state circulates, it goes
   from one forward to the next and, as another copy, from one backward to the next.
5. *Corrections.* Where late weights are predicted, a rank does so before the first forward that
   reads them, from the version that is there and the one before it. Where their gradients are
   compensated, the backward reads the weights of its step, too.
6. *Frees.* Activations go when their backward has ended, predictions when all of theirs have, a
   weight version when the rank no longer reads it, predicts from it, hands it on or updates it.

At one tick a rank first sends and receives, then updates, hands on weights, frees predictions,
predicts, frees all else, and computes.
The order of messages is the same on all ranks, so that blocking channels cannot deadlock.
"""

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, dropwhile, groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from toolkit.errors import whole
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
    Op,
    collector_paused,
)
from toolkit.schedule.program import Program

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule


# What a rank does at one tick, in order.
_PHASES = range(8)
_BOUNDARIES, _REDUCTIONS, _UPDATES, _WEIGHTS, _FORGETS, _PREDICTIONS, _FREES, _OPS = _PHASES
_MESSAGES: dict[Buffer, int] = {GRADIENT: _REDUCTIONS, WEIGHTS: _WEIGHTS}


def lower(schedule: "Schedule", n_steps: int, first_step: int = 0) -> Program:
    """See :meth:`Schedule.lower`."""
    n = whole(n_steps, "n_steps, the training steps of a program,", 1)
    first = whole(first_step, "first_step of a program", 0)
    with collector_paused():
        return _Lowering(schedule, range(first, first + n)).program()


class _Read(NamedTuple):
    """A rank computes with a weight version from ``start`` to ``end``."""

    start: int
    end: int
    rank: int
    backward: bool = False


# Of many named tuples: their own constructors take twice as long.
_instruction, _read = partial(tuple.__new__, Instruction), partial(tuple.__new__, _Read)
_tick = itemgetter(0)


@dataclass
class _Stay:
    """A rank holds a weight version from ``since`` to ``until``."""

    rank: int
    since: int
    until: int


class _Update(NamedTuple):
    """A weight version is made at ``tick`` on ``ranks``."""

    tick: int
    ranks: tuple[int, ...]


class _Lowering:
    def __init__(self, schedule: "Schedule", steps: range) -> None:
        self.schedule = schedule
        self.steps = steps
        self.owner = schedule.owners
        self.rings = schedule.rings
        self.slot = schedule.timing.ticks_per_slot
        self.circulates = schedule.state == "circulating"
        # [rank][phase], in any order of ticks
        self.ranks: list[list[list[Instruction]]] = [
            [[] for _ in _PHASES] for _ in range(schedule.n_ranks)
        ]
        # [stage, version]; [stage, version, step][rank], from the first read to the last;
        # [stage, step], rank and end of each micro-batch's gradient
        self.reads: dict[tuple[int, int], list[_Read]] = defaultdict(list)
        self.predicted: dict[tuple[int, int, int], dict[int, _Read]] = defaultdict(dict)
        self.shares: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def program(self) -> Program:
        self._compute()
        self._predict()
        supply = self._hand_on if self.schedule.state == "replicated" else self._travel
        for j in range(self.schedule.n_stages):
            given = _Update(0, self.schedule.first_holders(j))
            for version in self.schedule.versions(j, self.steps.start)[:-1]:
                supply(j, version, given, None)
            made = given
            for step in self.steps:
                remade = self._reduce_and_update(j, step)
                supply(j, step, made, remade)
                made = remade
        # Stable: at one tick phases keep their order, and so does what belongs together in one.
        ranks = tuple(
            tuple(sorted(chain.from_iterable(phases), key=_tick)) for phases in self.ranks
        )
        return Program(self.schedule, len(self.steps), ranks, self.steps.start)

    def _message(
        self,
        source: int,
        target: int,
        tick: int,
        buffer: Buffer,
        j: int,
        m: int | None = None,
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        phase = _MESSAGES.get(buffer, _BOUNDARIES)
        send = (tick, SEND, j, m, step, version, buffer, (target,))
        receive = (tick, RECV, j, m, step, version, buffer, (source,))
        self.ranks[source][phase].append(_instruction(send))
        self.ranks[target][phase].append(_instruction(receive))

    def _compute(self) -> None:
        """The ops, their boundary messages, and the end of their activations."""
        schedule, timing = self.schedule, self.schedule.timing
        ops = sorted((start, *op) for op, start in timing.starts.items())
        actions = [*map(Action, Kind)]
        stages, microbatches = range(schedule.n_stages), range(schedule.n_microbatches)
        corrected = schedule.corrected.kind != "none"
        oldest = [schedule.first_version(j) for j in stages]
        for step in self.steps:
            begin = (step - self.steps.start) * timing.period
            place = [[schedule.rank(j, m, step) for m in microbatches] for j in stages]
            delays = schedule.delays(step)
            for start, kind, j, m in ops:
                start += begin
                end = start + self.slot
                rank = place[j][m]
                version = max(oldest[j], step - delays[j][m])
                read = _read((start, end, rank, kind != Kind.FORWARD))
                buffer = schedule.read_by(Op(kind, j, m), version, step) if corrected else None
                if buffer == PREDICTION:
                    here = self.predicted[j, version, step]
                    here[rank] = read._replace(start=here.get(rank, read).start)
                else:
                    self.reads[j, version].append(read)
                if buffer == COMPENSATED:
                    self.reads[j, step].append(read)
                phases = self.ranks[rank]
                op = start, actions[kind], j, m, step, version, buffer, ()
                phases[_OPS].append(_instruction(op))
                if kind == Kind.FORWARD:
                    if j < schedule.n_stages - 1 and (to := place[j + 1][m]) != rank:
                        self._message(rank, to, end, ACTIVATION, j, m, step)
                elif kind != Kind.BACKWARD_WEIGHT and j > 0 and (to := place[j - 1][m]) != rank:
                    self._message(rank, to, end, ACTIVATION_GRADIENT, j, m, step)
                if kind == Kind.BACKWARD or kind == Kind.BACKWARD_WEIGHT:
                    free = end, FREE, j, m, step, None, ACTIVATION, ()
                    phases[_FREES].append(_instruction(free))
                    self.shares[j, step].append((rank, end))  # ends ascend

    def _predict(self) -> None:
        """What is read instead of late weights, from just before its first use to its last."""
        for (j, version, step), reads in self.predicted.items():
            what = (j, None, step, version, PREDICTION)
            for start, end, rank, _ in reads.values():
                self.ranks[rank][_PREDICTIONS].append(Instruction(start, PREDICT, *what))
                self.ranks[rank][_FORGETS].append(Instruction(end, FREE, *what))
                for needed in (version - 1, version):
                    self.reads[j, needed].append(_Read(start, start, rank))

    def _reduce_and_update(self, j: int, step: int) -> _Update:
        """Sum stage j's gradient of ``step``, and update."""
        parts = self.shares[j, step]
        shares = dict(parts)  # the tick at which each rank's is summed
        owner = self.owner[j]
        ready = max(shares.values())
        updaters: tuple[int, ...] = (owner,)
        whole = shares.keys() == {*self.schedule.layout.ranks(j)}
        if len(shares) > 1 and whole and len(set(shares.values())) == 1:
            group = tuple(sorted(shares, key=lambda rank: (rank != owner, rank)))
            action = REDUCE
            if self.schedule.state == "replicated":
                action, updaters = ALL_REDUCE, group
            reduce = Instruction(ready, action, j, None, step, None, GRADIENT, group)
            for rank in group:
                self.ranks[rank][_REDUCTIONS].append(reduce)
        else:
            summed = 0
            for (source, end), (target, _) in pairwise(self._chain(j, parts)):
                summed = max(summed, end)
                if source != target:
                    self._message(source, target, summed, GRADIENT, j, step=step)
        for rank in updaters:
            update = Instruction(ready, UPDATE, j, step=step, version=step + 1)
            self.ranks[rank][_UPDATES].append(update)
        return _Update(ready, updaters)

    def _chain(self, j: int, parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The ranks that hand on stage j's running sum, each with its end; its owner last."""
        owner, shares = self.owner[j], dict(parts)
        if self.rings:
            return [(rank, shares[rank]) for rank in chain.from_iterable(self.rings[j])]
        if not self.circulates:  # a rank adds to its share until its last micro-batch
            parts = sorted(shares.items(), key=itemgetter(1, 0))
        last = shares.get(owner, 0)
        return [*(part for part in parts if part[0] != owner), (owner, last)]

    def _hand_on(self, j: int, version: int, made: _Update, remade: _Update | None) -> None:
        """Replicated: the version goes once to each rank that reads it, and stays there."""
        reads = sorted(self.reads[j, version])
        first: dict[int, _Read] = {}
        for read in reads:
            first.setdefault(read.rank, read)
        until = dict.fromkeys(made.ranks, made.tick)
        ways = [[r for r in way if r not in until] for way in self._ways(j, first)]
        hops = [hop for way in ways for hop in pairwise([self.owner[j], *way])]
        # Handed on after the source's first op with it, or a slot before the target's.
        starts = [[first.get(rank, reads[-1]).start for rank in hop] for hop in hops]
        due = [min(here + self.slot, there - self.slot) for here, there in starts]
        latest = [*accumulate(reversed(due), min)]
        for (source, target), before in zip(hops, reversed(latest), strict=True):
            at = max(made.tick, before)
            self._message(source, target, at, WEIGHTS, j, version=version)
            until[source] = max(until[source], at)
            until[target] = at
        for read in reads:
            until[read.rank] = max(until[read.rank], read.end)
        if remade:
            for rank in remade.ranks:
                until[rank] = max(until[rank], remade.tick)
        for rank, tick in until.items():
            self._free_weights(tick, rank, j, version)

    def _ways(self, j: int, first: dict[int, _Read]) -> list[list[int]]:
        """Who gets a version from the owner on, in order: other groups, and the owner's."""
        owner = self.owner[j]
        if not self.rings:
            start = first[owner].start if owner in first else None
            together = [rank for rank in first if first[rank].start == start]
            return [[rank for rank in first if rank not in together], together]
        *others, group = self.rings[j]
        ways = [*chain.from_iterable(others)], group[:-1]
        # No farther than to the last that reads it.
        return [[*dropwhile(lambda rank: rank not in first, reversed(way))][::-1] for way in ways]

    def _travel(self, j: int, version: int, made: _Update, remade: _Update | None) -> None:
        """Sharded: the version goes from op to op; its owner keeps it until the update.

        Where ranks need it at the same moment the owner keeps it for all of its readers instead.
        """
        owner = self.owner[j]
        moments = []
        for start, group in groupby(sorted(self.reads[j, version]), key=lambda read: read.start):
            reads = [*group]
            ranks = sorted({read.rank for read in reads})
            moments.append((start, ranks, max(read.end for read in reads), reads[0].backward))
        at_once = any(len(ranks) > 1 for _, ranks, *_ in moments)
        master = _Stay(owner, made.tick, remade.tick if remade else made.tick)
        if at_once:
            master.until = max(master.until, moments[-1][0])
        stays, lasting = [master], [master]
        # Who hands it on, and until when it was used: in forwards; in backwards, if it circulates.
        holders = [(master, made.tick)] * 2
        for start, ranks, end, backward in moments:
            flow = self.circulates and backward
            holder, used = holders[flow]
            lasting = [stay for stay in lasting if start - self.slot <= stay.until]
            here = {stay.rank: stay for stay in (*lasting, holder)}
            missing = [rank for rank in ranks if rank not in here]
            if len(missing) > 1:
                what = (j, None, None, version, WEIGHTS, (owner, *missing))
                for rank in (owner, *missing):
                    self.ranks[rank][_WEIGHTS].append(Instruction(start, BROADCAST, *what))
                here |= {rank: _Stay(rank, start, start) for rank in missing}
            elif missing:
                at = min(start, max(holder.since, used, start - self.slot))
                self._message(holder.rank, missing[0], at, WEIGHTS, j, version=version)
                holder.until = max(holder.until, at)
                here[missing[0]] = _Stay(missing[0], at, at)
            stays += [here[rank] for rank in missing]
            lasting = [*here.values()]
            for rank in ranks:
                here[rank].until = max(here[rank].until, end)
            if not at_once:
                last = here[ranks[0]]
                for k, (stay, _) in enumerate(holders):  # a rank holds a version once
                    if k == flow or stay.rank == last.rank:
                        holders[k] = last, end
        for stay in stays:
            self._free_weights(stay.until, stay.rank, j, version)

    def _free_weights(self, at: int, rank: int, j: int, version: int) -> None:
        free = Instruction(at, FREE, j, version=version, buffer=WEIGHTS)
        self.ranks[rank][_FREES].append(free)

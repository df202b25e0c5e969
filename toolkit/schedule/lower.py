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
from itertools import chain, groupby, pairwise
from math import inf
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


# A program has many of these: their own constructors take twice as long.
_instruction = partial(tuple.__new__, Instruction)
_read = partial(tuple.__new__, _Read)
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


class _Moment(NamedTuple):
    """Ranks that begin to read a weight version at the same tick, ``start``.

    Attributes:
        start: tick at which they begin.
        ranks: these ranks, ascending.
        end: tick at which the last of them has ended.
        backward: whether they read it in backwards.
    """

    start: int
    ranks: list[int]
    end: int
    backward: bool


class _Lowering:
    """The instructions of all ranks, as they are inferred.

    Attributes:
        owner: rank that updates each stage.
        rings: for each stage, the ranks round which gradients and weights go; empty if chains
            follow the order in which ranks finish.
        slot: ticks that an op takes.
        ranks: instructions of ``[rank][phase]``, in any order of ticks.
        reads: by stage and version, the ops that read it.
        predicted: by stage, version and step, then by rank: from the first read of a prediction
            to the last.
        shares: by stage and step, the rank and the end of each micro-batch's gradient.
    """

    def __init__(self, schedule: "Schedule", steps: range) -> None:
        self.schedule = schedule
        self.steps = steps
        self.owner = schedule.owners
        self.rings = schedule.rings
        self.slot = schedule.timing.ticks_per_slot
        self.circulates = schedule.state == "circulating"
        self.ranks: list[list[list[Instruction]]] = [
            [[] for _ in _PHASES] for _ in range(schedule.n_ranks)
        ]
        self.reads: dict[tuple[int, int], list[_Read]] = defaultdict(list)
        self.predicted: dict[tuple[int, int, int], dict[int, _Read]] = defaultdict(dict)
        self.shares: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def program(self) -> Program:
        """Infer everything, and put each rank's instructions in order."""
        self._compute()
        self._predict()
        is_replicated = self.schedule.state == "replicated"
        supply = self._hand_on if is_replicated else self._travel
        for stage in range(self.schedule.n_stages):
            # Versions from before the program lie on their first holders.
            update = _Update(0, self.schedule.first_holders(stage))
            for version in self.schedule.versions(stage, self.steps.start)[:-1]:
                supply(stage, version, update, None)
            for step in self.steps:
                next_update = self._reduce_and_update(stage, step)
                supply(stage, step, update, next_update)
                update = next_update
        # A stable sort: at one tick phases keep their order, and so do the instructions of a phase.
        ranks = []
        for phases in self.ranks:
            instructions = chain.from_iterable(phases)
            ranks.append(tuple(sorted(instructions, key=_tick)))
        return Program(self.schedule, len(self.steps), tuple(ranks), self.steps.start)

    def _message(
        self,
        source: int,
        target: int,
        tick: int,
        buffer: Buffer,
        stage: int,
        microbatch: int | None = None,
        step: int | None = None,
        version: int | None = None,
    ) -> None:
        phase = _MESSAGES.get(buffer, _BOUNDARIES)
        send = (tick, SEND, stage, microbatch, step, version, buffer, (target,))
        receive = (tick, RECV, stage, microbatch, step, version, buffer, (source,))
        self.ranks[source][phase].append(_instruction(send))
        self.ranks[target][phase].append(_instruction(receive))

    def _compute(self) -> None:
        """Add the ops, their boundary messages, and the end of their activations."""
        schedule, timing = self.schedule, self.schedule.timing
        ops = sorted((start, *op) for op, start in timing.starts.items())
        action_of_kind = [*map(Action, Kind)]
        stages, microbatches = range(schedule.n_stages), range(schedule.n_microbatches)
        is_corrected = schedule.corrected.kind != "none"
        first_version = [schedule.first_version(stage) for stage in stages]
        for step in self.steps:
            step_start = (step - self.steps.start) * timing.period
            rank_of = [[schedule.rank(j, m, step) for m in microbatches] for j in stages]
            delays = schedule.delays(step)
            for op_start, kind, stage, microbatch in ops:
                start = step_start + op_start
                end = start + self.slot
                rank = rank_of[stage][microbatch]
                phases = self.ranks[rank]

                # 1. The weights that the op reads.
                version = max(first_version[stage], step - delays[stage][microbatch])
                read = _read((start, end, rank, kind != Kind.FORWARD))
                buffer = None
                if is_corrected:
                    buffer = schedule.read_by(Op(kind, stage, microbatch), version, step)
                if buffer == PREDICTION:
                    self._extend_prediction((stage, version, step), read)
                else:
                    self.reads[stage, version].append(read)
                if buffer == COMPENSATED:
                    self.reads[stage, step].append(read)

                # 2. The op.
                action = action_of_kind[kind]
                op = (start, action, stage, microbatch, step, version, buffer, ())
                phases[_OPS].append(_instruction(op))

                # 3. What it sends to the next stage, or to the one before.
                if kind == Kind.FORWARD:
                    if stage < schedule.n_stages - 1:
                        target = rank_of[stage + 1][microbatch]
                        if target != rank:
                            self._message(rank, target, end, ACTIVATION, stage, microbatch, step)
                elif kind != Kind.BACKWARD_WEIGHT and stage > 0:
                    target = rank_of[stage - 1][microbatch]
                    if target != rank:
                        self._message(
                            rank, target, end, ACTIVATION_GRADIENT, stage, microbatch, step
                        )

                # 4. The end of its activations.
                if kind == Kind.BACKWARD or kind == Kind.BACKWARD_WEIGHT:
                    free = (end, FREE, stage, microbatch, step, None, ACTIVATION, ())
                    phases[_FREES].append(_instruction(free))
                    self.shares[stage, step].append((rank, end))  # ends ascend

    def _extend_prediction(self, key: tuple[int, int, int], read: _Read) -> None:
        """Let a prediction last from its first read on a rank to ``read``, the latest so far."""
        reads_of_ranks = self.predicted[key]
        first_read = reads_of_ranks.get(read.rank, read)
        reads_of_ranks[read.rank] = read._replace(start=first_read.start)

    def _predict(self) -> None:
        """Add predictions, each from just before its first use to its last."""
        for (stage, version, step), reads_of_ranks in self.predicted.items():
            prediction = (stage, None, step, version, PREDICTION)
            for start, end, rank, _ in reads_of_ranks.values():
                self.ranks[rank][_PREDICTIONS].append(Instruction(start, PREDICT, *prediction))
                self.ranks[rank][_FORGETS].append(Instruction(end, FREE, *prediction))
                for source_version in (version - 1, version):
                    self.reads[stage, source_version].append(_Read(start, start, rank))

    def _reduce_and_update(self, stage: int, step: int) -> _Update:
        """Sum the gradient of a stage and step over its ranks, and update."""
        shares = self.shares[stage, step]
        ready_ticks = dict(shares)  # the tick at which each rank has summed its micro-batches
        owner = self.owner[stage]
        ready = max(ready_ticks.values())
        updaters: tuple[int, ...] = (owner,)
        every_rank = ready_ticks.keys() == {*self.schedule.layout.ranks(stage)}
        at_once = len(set(ready_ticks.values())) == 1
        if len(ready_ticks) > 1 and every_rank and at_once:
            # The owner is the root, so it comes first.
            group = tuple(sorted(ready_ticks, key=lambda rank: (rank != owner, rank)))
            action = REDUCE
            if self.schedule.state == "replicated":
                action = ALL_REDUCE
                updaters = group
            reduction = Instruction(ready, action, stage, None, step, None, GRADIENT, group)
            for rank in group:
                self.ranks[rank][_REDUCTIONS].append(reduction)
        else:
            summed = 0
            for (source, end), (target, _) in pairwise(self._chain(stage, shares)):
                summed = max(summed, end)
                if source != target:
                    self._message(source, target, summed, GRADIENT, stage, step=step)
        for rank in updaters:
            update = Instruction(ready, UPDATE, stage, step=step, version=step + 1)
            self.ranks[rank][_UPDATES].append(update)
        return _Update(ready, updaters)

    def _chain(self, stage: int, shares: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranks that hand on a running sum, each with its end; the owner last."""
        owner = self.owner[stage]
        ready_ticks = dict(shares)
        if self.rings:
            return [(rank, ready_ticks[rank]) for rank in chain.from_iterable(self.rings[stage])]
        if not self.circulates:
            # A rank adds to its share until its last micro-batch, and then hands it on once.
            shares = sorted(ready_ticks.items(), key=itemgetter(1, 0))
        links = [(rank, end) for rank, end in shares if rank != owner]
        links.append((owner, ready_ticks.get(owner, 0)))
        return links

    def _hand_on(
        self, stage: int, version: int, update: _Update, next_update: _Update | None
    ) -> None:
        """Replicated: the version goes once to each rank that reads it, and stays there."""
        reads = sorted(self.reads[stage, version])
        first_read: dict[int, _Read] = {}
        for read in reads:
            first_read.setdefault(read.rank, read)

        # 1. Ranks that made the version have it; the others get it along chains from the owner.
        last_use = dict.fromkeys(update.ranks, update.tick)
        handovers = []
        for path in self._handover_paths(stage, first_read):
            source = self.owner[stage]
            for target in path:
                if target not in update.ranks:
                    handovers.append((source, target))
                    source = target

        # 2. The source passes the version on once its own first op with it has begun, and a slot
        # before the target's op. From the end of the chains backwards, no handover may come after
        # a later one: with blocking channels the two ranks would wait for each other.
        handover_ticks = []
        next_tick = inf
        for source, target in reversed(handovers):
            source_ready = first_read.get(source, reads[-1]).start + self.slot
            target_needs = first_read.get(target, reads[-1]).start - self.slot
            next_tick = min(source_ready, target_needs, next_tick)
            handover_ticks.append(int(max(update.tick, next_tick)))
        handover_ticks.reverse()
        for (source, target), tick in zip(handovers, handover_ticks, strict=True):
            self._message(source, target, tick, WEIGHTS, stage, version=version)
            last_use[source] = max(last_use[source], tick)
            last_use[target] = tick

        # 3. A rank frees it after its last op with it, or after the update that replaces it.
        for read in reads:
            last_use[read.rank] = max(last_use[read.rank], read.end)
        if next_update is not None:
            for rank in next_update.ranks:
                last_use[rank] = max(last_use[rank], next_update.tick)
        for rank, tick in last_use.items():
            self._free_weights(tick, rank, stage, version)

    def _handover_paths(self, stage: int, first_read: dict[int, _Read]) -> list[list[int]]:
        """Return the paths of ranks on which a version goes from the owner, in order.

        The first path is that of other ranks, the second that of those which begin with the owner,
        or of its group.
        """
        owner = self.owner[stage]
        if not self.rings:
            owner_start = None
            if owner in first_read:
                owner_start = first_read[owner].start
            ranks_with_owner = [
                rank for rank in first_read if first_read[rank].start == owner_start
            ]
            other_ranks = [rank for rank in first_read if rank not in ranks_with_owner]
            return [other_ranks, ranks_with_owner]
        *other_groups, own_group = self.rings[stage]
        paths = []
        for path in ([*chain.from_iterable(other_groups)], own_group[:-1]):
            # No farther than to the last rank that reads the version.
            n_ranks = len(path)
            while n_ranks and path[n_ranks - 1] not in first_read:
                n_ranks -= 1
            paths.append([*path[:n_ranks]])
        return paths

    def _moments(self, stage: int, version: int) -> list[_Moment]:
        """Return the reads of a version, in order, together where they begin together."""
        reads_in_order = sorted(self.reads[stage, version])
        moments = []
        for start, group in groupby(reads_in_order, key=_tick):
            reads = [*group]
            ranks = sorted({read.rank for read in reads})
            end = max(read.end for read in reads)
            moments.append(_Moment(start, ranks, end, reads[0].backward))
        return moments

    def _travel(
        self, stage: int, version: int, update: _Update, next_update: _Update | None
    ) -> None:
        """Sharded: the version goes from op to op; its owner keeps it until the update.

        Where ranks need it at the same moment the owner keeps it for all of its readers instead.
        """
        owner = self.owner[stage]
        moments = self._moments(stage, version)
        at_once = any(len(moment.ranks) > 1 for moment in moments)
        master = _Stay(owner, update.tick, next_update.tick if next_update else update.tick)
        if at_once:
            master.until = max(master.until, moments[-1].start)
        stays = [master]
        present = [master]  # who may still have it as the next moment begins
        # Who hands it on, and until when it used it: to forwards, and, if the state circulates,
        # as another copy to backwards.
        holders = [(master, update.tick), (master, update.tick)]
        for start, ranks, end, backward in moments:
            copy = int(self.circulates and backward)
            holder, last_used = holders[copy]
            present = [stay for stay in present if start - self.slot <= stay.until]
            stay_of = {stay.rank: stay for stay in (*present, holder)}
            missing = [rank for rank in ranks if rank not in stay_of]
            if len(missing) > 1:
                group = (owner, *missing)
                broadcast = Instruction(
                    start, BROADCAST, stage, None, None, version, WEIGHTS, group
                )
                for rank in group:
                    self.ranks[rank][_WEIGHTS].append(broadcast)
                for rank in missing:
                    stay_of[rank] = _Stay(rank, start, start)
            elif missing:
                (target,) = missing
                tick = min(start, max(holder.since, last_used, start - self.slot))
                self._message(holder.rank, target, tick, WEIGHTS, stage, version=version)
                holder.until = max(holder.until, tick)
                stay_of[target] = _Stay(target, tick, tick)
            stays += [stay_of[rank] for rank in missing]
            present = [*stay_of.values()]
            for rank in ranks:
                stay_of[rank].until = max(stay_of[rank].until, end)
            if not at_once:
                reader = stay_of[ranks[0]]
                for k, (stay, _) in enumerate(holders):
                    # A rank holds a version once, also where it hands on both copies.
                    if k == copy or stay.rank == reader.rank:
                        holders[k] = (reader, end)
        for stay in stays:
            self._free_weights(stay.until, stay.rank, stage, version)

    def _free_weights(self, tick: int, rank: int, stage: int, version: int) -> None:
        free = Instruction(tick, FREE, stage, version=version, buffer=WEIGHTS)
        self.ranks[rank][_FREES].append(free)

"""From ops to instructions: the schedule says what computes when, lowering infers the rest.

Everything inferred follows from six rules.

1. *Boundaries.* Where stage j and the stage after (before) it sit on different ranks, the output
   (the gradient of the input) is sent when the op has ended.
2. *Gradients.* A rank sums what it computed. If all ranks of a stage complete their sums at the
   same tick, the sums meet in a collective: an all-reduce, or, where the state is sharded, a
   reduction to the owner. Otherwise a running sum is handed from rank to rank in the order in which
   they finish, or round the stage's ring if chains are rotated, and ends at the stage's owner. If
   the state circulates, a rank hands the sum on after each of its micro-batches, and keeps none.
3. *Updates.* The owner updates; after an all-reduce every rank does, from the same sum.
4. *Weights.* A version is handed on to the ranks that read it, along two paths that begin at the
   owner: one has the ranks whose first op with the version begins at the same tick as the owner's,
   the other has all others in the order in which they first need it. Round a ring, the owner's own
   group is one path and the other groups are the other. Where the state is sharded a rank keeps
   the version for one op only and hands it on after that; ranks that need it at the same tick get
   it by a broadcast from the owner. If the state circulates, it goes from one forward to the next
   and, as another copy, from one backward to the next.
5. *Corrections.* Where late weights are predicted, a rank does so before the first forward that
   reads them, from the version that is there and the one before it. Where their gradients are
   compensated, the backward reads the weights of its step, too.
6. *Frees.* Activations go when their backward has ended, predictions when all of theirs have, a
   weight version when the rank no longer reads it, predicts from it, hands it on or updates it.

At one tick a rank first sends and receives, then updates, hands on weights, frees predictions,
predicts, frees all else, and computes: the turns of toolkit.schedule.instruction_lists.
The order of messages is the same on all ranks, so that blocking channels cannot deadlock.
"""

from collections import defaultdict
from itertools import chain, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

from toolkit.errors import whole
from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    ALL_REDUCE,
    BACKWARD,
    BACKWARD_WEIGHT,
    COMPENSATED,
    FORWARD,
    FREE,
    GRADIENT,
    PREDICT,
    PREDICTION,
    REDUCE,
    UPDATE,
    Action,
    Buffer,
    Instruction,
    Kind,
    Op,
    collector_paused,
)
from toolkit.schedule.instruction_lists import (
    BOUNDARIES,
    FREES,
    GRADIENT_SUMS,
    OPS,
    PREDICTION_FREES,
    PREDICTIONS,
    UPDATES,
    InstructionLists,
    make_instruction,
)
from toolkit.schedule.program import Program
from toolkit.schedule.weight_handover import Read, Update, WeightHandover

if TYPE_CHECKING:
    from toolkit.schedule.schedule import Schedule

_LAST_BACKWARDS = (BACKWARD, BACKWARD_WEIGHT)

_Place = tuple[int, int, list[Read]]
"""Rank of a micro-batch at a stage, weight version that it reads, and all reads of that version."""


def lower(schedule: "Schedule", n_steps: int, first_step: int = 0) -> Program:
    """See :meth:`Schedule.lower`."""
    n = whole(n_steps, "n_steps, the training steps of a program,", 1)
    first = whole(first_step, "first_step of a program", 0)
    with collector_paused():
        return _Lowering(schedule, range(first, first + n)).program()


class _Lowering:
    """The instructions of all ranks, as they are inferred.

    Attributes:
        owners: rank that updates each stage.
        slot: ticks that an op takes.
        lists: the instructions of all ranks.
        handover: adds the messages of weights, once it knows the reads of every version.
        predicted: by stage, version and step, then by rank: from the first read of a prediction
            to the last.
        shares: by stage and step, the rank and the end of each micro-batch's gradient.
    """

    def __init__(self, schedule: "Schedule", steps: range) -> None:
        self.schedule = schedule
        self.steps = steps
        self.owners = schedule.owners
        self.slot = schedule.timing.ticks_per_slot
        self.lists = InstructionLists(schedule.n_ranks)
        self.handover = WeightHandover(schedule, self.lists)
        self.predicted: dict[tuple[int, int, int], dict[int, Read]] = defaultdict(dict)
        self.shares: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)

    def program(self) -> Program:
        """Infer everything, and put each rank's instructions in order."""
        # The order of these steps matters. Predictions read weights as ops do, and a version's way
        # depends on all reads of it: so weights are handed on last.
        self._compute()
        self._predict()
        for stage in range(self.schedule.n_stages):
            # Versions that the program begins with lie on their first holders, as if these had
            # just updated. The holders are the same for every first step, since a program begins
            # with nothing under way. The newest version ([-1]) is supplied in the loop below,
            # since the first step reads it too.
            last_update = Update(0, self.schedule.first_holders(stage))
            first_versions = self.schedule.versions(stage, self.steps.start)
            for version in first_versions[:-1]:
                # No update of this program replaces it.
                self.handover.supply(stage, version, last_update, None)
            # Version ``step`` is there from the update of the step before until the next one.
            for step in self.steps:
                next_update = self._reduce_and_update(stage, step)
                self.handover.supply(stage, step, last_update, next_update)
                last_update = next_update
        return Program(
            self.schedule, len(self.steps), self.lists.in_order(), self.steps.start
        )

    def _compute(self) -> None:
        """Add the ops, their boundary messages, and the end of their activations."""
        schedule, timing = self.schedule, self.schedule.timing
        action_of_kind = [*map(Action, Kind)]
        ops = []
        for (kind, stage, microbatch), start in timing.starts.items():
            ops.append((start, action_of_kind[kind], stage, microbatch))
        ops.sort()
        last_stage = schedule.n_stages - 1
        is_corrected = schedule.corrected.kind != "none"
        by_turn = self.lists.by_turn
        add_message = self.lists.add_message
        for step in self.steps:
            step_start = (step - self.steps.start) * timing.period
            places = self._places(step)
            for op_start, action, stage, microbatch in ops:
                start = step_start + op_start
                end = start + self.slot
                rank, version, reads = places[stage][microbatch]

                # The weights that the op reads, and how they are corrected, if they are.
                read = (start, end, rank, action != FORWARD)
                buffer = None
                if is_corrected:
                    op = Op(Kind(action), stage, microbatch)
                    buffer = schedule.read_by(op, version, step)
                    self._add_read(read, stage, version, step, buffer)
                else:
                    reads.append(read)

                # The op: a tuple of Instruction's fields, whose constructor takes twice as long.
                compute = (start, action, stage, microbatch, step, version, buffer, ())
                by_turn[rank][OPS].append(make_instruction(compute))

                # Rule 1: its output goes to the next stage, a gradient to the one before.
                if action == FORWARD:
                    if stage < last_stage:
                        target = places[stage + 1][microbatch][0]
                        if target != rank:
                            output = (stage, microbatch, step, None, ACTIVATION)
                            add_message(BOUNDARIES, rank, target, end, output)
                elif action != BACKWARD_WEIGHT and stage > 0:
                    target = places[stage - 1][microbatch][0]
                    if target != rank:
                        gradient = (stage, microbatch, step, None, ACTIVATION_GRADIENT)
                        add_message(BOUNDARIES, rank, target, end, gradient)

                # Rule 6: its activations end.
                if action in _LAST_BACKWARDS:
                    free = (end, FREE, stage, microbatch, step, None, ACTIVATION, ())
                    by_turn[rank][FREES].append(make_instruction(free))
                    self.shares[stage, step].append((rank, end))  # ends ascend

    def _places(self, step: int) -> list[list[_Place]]:
        """Return ``[stage][microbatch]``, what all ops of a micro-batch at a stage share."""
        schedule = self.schedule
        delays = schedule.delays(step)
        places = []
        for stage in range(schedule.n_stages):
            first_version = schedule.first_version(stage)
            places_of_stage = []
            for microbatch, delay in enumerate(delays[stage]):
                rank = schedule.rank(stage, microbatch, step)
                version = max(first_version, step - delay)
                # The handover's own list: ops append their reads to it.
                reads = self.handover.reads[stage, version]
                places_of_stage.append((rank, version, reads))
            places.append(places_of_stage)
        return places

    def _add_read(
        self, read: Read, stage: int, version: int, step: int, buffer: Buffer | None
    ) -> None:
        """Add what an op reads: ``version``, or its prediction, or the newest weights as well."""
        if buffer == PREDICTION:
            # The prediction lasts from its first read on a rank to this one, the latest so far.
            _, end, rank, is_backward = read
            reads_of_ranks = self.predicted[stage, version, step]
            first_start, *_ = reads_of_ranks.get(rank, read)
            reads_of_ranks[rank] = (first_start, end, rank, is_backward)
            return
        self.handover.reads[stage, version].append(read)
        if buffer == COMPENSATED:
            # A second read: of the newest weights.
            self.handover.reads[stage, step].append(read)

    def _predict(self) -> None:
        """Add predictions, each from just before its first use to its last."""
        for (stage, version, step), reads_of_ranks in self.predicted.items():
            prediction = (stage, None, step, version, PREDICTION)
            for start, end, rank, _ in reads_of_ranks.values():
                turns = self.lists.by_turn[rank]
                turns[PREDICTIONS].append(Instruction(start, PREDICT, *prediction))
                turns[PREDICTION_FREES].append(Instruction(end, FREE, *prediction))
                for source_version in (version - 1, version):
                    read = (start, start, rank, False)
                    self.handover.reads[stage, source_version].append(read)

    def _reduce_and_update(self, stage: int, step: int) -> Update:
        """Sum the gradient of a stage and step over its ranks, and update."""
        shares = self.shares[stage, step]
        # The tick at which each rank has summed its micro-batches: its last end, since ends ascend.
        ready_ticks = dict(shares)
        owner = self.owners[stage]
        ready = max(ready_ticks.values())
        updaters: tuple[int, ...] = (owner,)
        every_rank = ready_ticks.keys() == {*self.schedule.layout.ranks(stage)}
        at_once = len(set(ready_ticks.values())) == 1
        if len(ready_ticks) > 1 and every_rank and at_once:
            # The owner is the root, so it comes first.
            members = tuple(sorted(ready_ticks, key=lambda rank: (rank != owner, rank)))
            action = REDUCE
            if self.schedule.state == "replicated":
                action = ALL_REDUCE
                updaters = members
            reduction = Instruction(
                ready, action, stage, None, step, None, GRADIENT, members
            )
            for rank in members:
                self.lists.by_turn[rank][GRADIENT_SUMS].append(reduction)
        else:
            partial_sum = (stage, None, step, None, GRADIENT)
            summed_tick = 0  # when the sum so far is complete
            for (source, end), (target, _) in pairwise(self._sum_path(stage, shares)):
                summed_tick = max(summed_tick, end)
                if source != target:
                    self.lists.add_message(
                        GRADIENT_SUMS, source, target, summed_tick, partial_sum
                    )
        update = Instruction(ready, UPDATE, stage, step=step, version=step + 1)
        for rank in updaters:
            self.lists.by_turn[rank][UPDATES].append(update)
        return Update(ready, updaters)

    def _sum_path(
        self, stage: int, shares: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the ranks that hand on a running sum, each with its end; the owner last."""
        owner = self.owners[stage]
        ready_ticks = dict(shares)
        if self.schedule.rings:
            # A ring ends at the owner.
            ring = chain.from_iterable(self.schedule.rings[stage])
            return [(rank, ready_ticks[rank]) for rank in ring]
        if self.schedule.state != "circulating":
            # A rank adds to its share until its last micro-batch, and then hands it on once.
            shares = sorted(ready_ticks.items(), key=itemgetter(1, 0))
        # Otherwise a rank occurs once for each of its micro-batches.
        path = [(rank, end) for rank, end in shares if rank != owner]
        # The owner comes last and only receives, so its tick is never read. It may even have no
        # micro-batch of the stage.
        path.append((owner, ready_ticks.get(owner, 0)))
        return path

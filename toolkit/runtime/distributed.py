"""One rank of a schedule's program, on torch.distributed: a process for each."""

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import nn

from toolkit.errors import UserError, check_choice
from toolkit.model import Stages
from toolkit.model.analysis import meta_copy
from toolkit.runtime import hierarchy
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.checks import checked_world, scalar
from toolkit.runtime.executor import Executor
from toolkit.runtime.grouped import Loss
from toolkit.runtime.message_layout import COMPRESSIONS, Layouts, find_layouts
from toolkit.runtime.messages import Messages, largest_chunk
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, Shape
from toolkit.runtime.process_group.group import World
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.start_offset import StartOffset
from toolkit.runtime.state import part_of
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler, Weights
from toolkit.runtime.warmup import warm_up
from toolkit.runtime.weight_store import WeightStore
from toolkit.schedule import Action, Program, Schedule

_WINDOW = 50_000  # ops of the training steps that are lowered at once


class Distributed(Runtime):
    """Trains stages by a schedule, one process a rank.

    Every rank makes it with the same arguments, and calls the same methods in the same order;
    rank 0's initial weights count. The trajectory is that of :class:`SingleProcess`. A rank keeps
    the weights of the stages that it updates, and what its program has it hold; parameters of the
    model that is given may be empty while it trains: :meth:`module` gives it whole.

    Args:
        stages: the model, partitioned, on the device of the rank.
        schedule: a schedule of as many stages, on as many ranks as there are processes.
        optimizer: function from the list of a stage's parameters to its optimizer; one that takes
            their names, too, is marked by :func:`toolkit.runtime.by_name`.
        loss: mean loss of a micro-batch, from outputs and targets.
        lr_scheduler: function from a stage's optimizer to its learning-rate schedule.
        seed: seed of the model's random draws in training, such as dropout.
        options: how stages compute and update.
        world: the ranks; those of this job unless given.
        record: first training steps of which messages, memory and time are measured (see
            :meth:`measurements`).
        overlap: whether messages and updates run during computation, so that an op waits only
            for its inputs. If not, everything waits for its turn in the program.
        chunk_mb: largest part of a message that is sent at once, in MB; None: 1, or with NCCL all
            of it, unless it is paced.
        compression: ``none``, or ``fp16`` or ``bf16`` for the messages of gradients and weights.
            Sums that are handed on are made in the model's own type, those of collectives in
            16 bits. The rank that updates a stage keeps its exact weights; other ranks compute
            with rounded ones. The rounding error of weights that they predict d steps ahead is
            up to 1 + 2d times as large.
        per_machine: consecutive ranks on a machine, for all-reduces within each machine before
            those between machines; 0: the backend's own.
        pacing: whether each rank spreads what it sends over the training step, in chunks: the
            smaller they are, the more even the load.

    Attributes:
        n_recorded: training steps that have been measured.

    Raises:
        UserError: stages, schedule and ranks do not fit, or an option has no such value.
    """

    world: World
    _overlaps = True
    _way_out = "start the ranks again"  # for messages are still under way

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        *,
        lr_scheduler: MakeScheduler | None = None,
        seed: int = 0,
        options: StepOptions = PLAIN,
        world: World | None = None,
        record: int = 0,
        overlap: bool = True,
        chunk_mb: float | None = None,
        compression: str = "none",
        pacing: bool = False,
        per_machine: int = 0,
    ) -> None:
        super().__init__(stages, schedule, optimizer, options)
        options.check(schedule, whole_step=False)
        check_choice("compression", compression, COMPRESSIONS)
        if chunk_mb is not None and not 0 < chunk_mb < inf:
            raise UserError(f"chunk_mb is a size above 0: got {chunk_mb}; 1 to 4 is usual")
        if per_machine < 0:
            raise UserError(f"per_machine is a number of ranks, 0 or more: got {per_machine}")
        self.world = checked_world(world, stages, schedule)
        self._options = options
        self._loss = options.computed(scalar(loss))
        self._runners = [
            StageRunner(stage, j, optimizer, lr_scheduler, seed, options)
            for j, stage in enumerate(stages)
        ]
        self._updaters = self._runners
        self._skeletons = [meta_copy(runner.compute) for runner in self._runners]
        self._layouts: dict[Shape, Layouts] = {}
        self._compressed = COMPRESSIONS[compression]
        self._chunk_bytes = largest_chunk(chunk_mb, self.world.backend, paced=pacing)
        self._overlap = overlap
        self._paced = pacing
        self._per_machine = per_machine
        self._weight_store = WeightStore(self.world, stages, self.schedule, self._runners)
        self._meter = (
            Meter(self.rank, self.world.device, self.world.common_moment()) if record else None
        )
        self._to_record = record
        self.n_recorded = 0

    def _steps(self, source: BatchReader, n_steps: int | None) -> Steps:
        assert n_steps is not None, "it looks ahead"
        source.alike = True
        return self._train(source, n_steps, self._find_layouts(source.shape))

    def _train(self, source: BatchReader, n_steps: int, layouts: Layouts) -> Steps:
        schedule, begin = self.schedule, self.steps_done
        feed = MicrobatchQueue(source, begin, self._reads)
        window = max(1, _WINDOW // len(schedule.timing.starts))
        messages = Messages(
            self.world,
            layouts,
            self._chunk_bytes,
            paced=self._paced,
            per_machine=self._per_machine,
        )
        with messages:
            while (left := begin + n_steps - self.steps_done) > 0:
                length = min(window, left, self._to_record or left)
                program = schedule.lower(length, self.steps_done).verify()
                yield from self._run(program, feed, messages)
                self.steps_done += length
        feed.skip_to(self.steps_done)

    def _module(self) -> nn.Module:
        """Until the next :meth:`run` it takes the memory of the whole model."""
        self._weight_store.collect()
        return self.stages.model

    def _averages(self) -> Weights:
        return self._weight_store.averages()

    @property
    def measures(self) -> bool:
        return self.n_recorded > 0

    def measurements(self) -> Measurements:
        """Return what all ranks measured. Every rank calls it.

        Raises:
            UserError: nothing was recorded, or a run was not exhausted.
        """
        self._check_ended()
        if self._meter is None or self.n_recorded == 0:
            raise UserError(
                "nothing was measured: make Distributed with record=STEPS, and let it train"
            )
        return Measurements(self.schedule, self.world.gather(self._meter.record))

    @property
    def own(self) -> list[int]:
        return self._weight_store.updated

    def _part(self) -> dict[str, Any]:
        known = self._weight_store.versions
        own = [j for j in self.own if self.schedule.owners[j] == self.rank]
        leads = self.rank == 0
        return part_of(self.steps_done, self.stages, self._runners, known, own, leads=leads)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._check_ended()
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._weight_store.load(state)
        for j in self.own:
            self._runners[j].load(state["stages"][j])

    def _run(self, program: Program, feed: MicrobatchQueue, messages: Messages) -> Steps:
        self.world.make_groups(*_who_meets(program, self._per_machine))
        held = self._weight_store.share(messages, program.first_step)
        turn = StartOffset(program, self.world)
        meter = self._meter if self._to_record else None
        rank = self._make_rank(program, feed, meter)
        rank.weights = held
        if meter is not None:
            meter.begin(rank)
        with Executor(rank, messages, program, turn, meter, overlap=self._overlap) as executor:
            for position in executor.in_order:
                executor.perform(position)
                if position in executor.ends:
                    yield feed.result(executor.ends[position])
            executor.finish()
        if meter is not None:
            meter.finish(program)
            self.n_recorded += program.n_steps
            self._to_record -= program.n_steps
        self.world.watch.at("between programs")

    def _make_rank(self, program: Program, feed: MicrobatchQueue, meter: Meter | None) -> Rank:
        runners = dict(enumerate(self._runners))
        updaters = {j: self._runners[j] for j in self._weight_store.updated}
        watching = {} if meter is None else {"watching": meter.activations.watch}
        return Rank(
            program, runners, updaters, self._weight_store.versions, self._loss, feed, **watching
        )

    def _reads(self, step: int) -> list[int]:
        """Those whose inputs or targets its first or last stage takes."""
        ends = (0, self.schedule.n_stages - 1)
        return [
            m
            for m in range(self.schedule.n_microbatches)
            if any(self.schedule.rank(j, m, step) == self.rank for j in ends)
        ]

    def _find_layouts(self, shape: Shape | None) -> Layouts:
        """The layouts of micro-batches of ``shape``, which not every rank has seen."""
        seen = next(found for found in self.world.gather(shape) if found is not None)
        if seen not in self._layouts:
            inputs = tuple(torch.empty(size, dtype=dtype, device="meta") for size, dtype in seen)
            with self._options.autocast(self.world.device):
                self._layouts[seen] = find_layouts(
                    self._skeletons, inputs, self._compressed, self.world.device
                )
            if self.world.backend == "nccl":
                self.world.watch.at("the first run of its stages")
                where = self.world.device, self._computed, self.own
                warm_up(self._runners, self._layouts[seen], inputs, *where)
        return self._layouts[seen]

    @property
    def _computed(self) -> list[int]:
        """The stages that this rank runs, whenever it may be."""
        layout = self.schedule.layout
        return [j for j in range(len(self.stages)) if self.rank in layout.ranks(j)]


def _who_meets(
    program: Program, per_machine: int
) -> tuple[list[hierarchy.Group], list[tuple[int, int]]]:
    """The groups of every collective; and (sender, receiver) of every message."""
    groups: set[hierarchy.Group] = set()
    pairs = set()
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action == Action.SEND:
                pairs.add((rank, i.peers[0]))
            elif i.action.communicates and i.action != Action.RECV:
                tiers = per_machine if i.action == Action.ALL_REDUCE else 0
                groups.update(hierarchy.groups(sorted(i.peers), tiers))
    return sorted(groups), sorted(pairs)

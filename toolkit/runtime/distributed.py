"""One rank of a schedule's program, on torch.distributed; each rank is a process."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from toolkit.cost import Costs, Hardware
from toolkit.cost.compression import MESSAGE_CODES
from toolkit.errors import UserError, check_choice, whole
from toolkit.runtime.base import Steps
from toolkit.runtime.executor import Executor
from toolkit.runtime.local_runtime import OnRanks
from toolkit.runtime.message_layout import MESSAGE_DTYPES, Layouts
from toolkit.runtime.message_transfer import Messages, groups_and_pairs, largest_chunk
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.meters.running_costs import Stopwatch, probe_links, running_costs
from toolkit.runtime.microbatches import (
    BatchReader,
    MicrobatchQueue,
    Shape,
    microbatches_read,
)
from toolkit.runtime.process_group import columns
from toolkit.runtime.rank import MicrobatchSource, Rank
from toolkit.runtime.rank_compression import load_ranks_state, ranks_state
from toolkit.runtime.rank_layouts import LossTrial, RankLayouts
from toolkit.runtime.row_executor import RowExecutor
from toolkit.runtime.runtime_arguments import check_width
from toolkit.runtime.state import local_state_of
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import Weights
from toolkit.runtime.weight_store import WeightStore
from toolkit.schedule import Program, Schedule

if TYPE_CHECKING:
    from toolkit.runtime.device_rows import DeviceRow
    from toolkit.runtime.sharded_stage import ShardedStage

# At the end of a program the pipeline drains, so programs are long. All ranks' instructions are in
# memory, and are lowered and verified before the first op, so there is a limit.
WINDOW = 50_000  # ops of the training steps that are lowered at once


@dataclass(eq=False, repr=False, kw_only=True)
class Distributed(OnRanks):
    """Trains stages by a schedule, one process a rank.

    Every rank makes it with the same arguments, and calls the same methods in the same order;
    the initial weights are those of rank 0. The trajectory is that of :class:`SingleProcess`.
    Parameters of the given model may be empty during training: :meth:`module` returns it whole.

    Args:
        stages, schedule, optimizer, loss, lr_scheduler, seed, options, world: as in ``OnRanks``.
        record: number of training steps, from the first, whose messages, memory and time are
            measured (see :meth:`measurements`).
        overlap: whether messages and updates run during computation, so that an op waits only
            for its inputs. If not, everything waits for its turn in the program.
        chunk_mb: largest part of a message that is sent at once, in MB. None: 1; with NCCL and no
            pacing, the whole message.
        compression: ``none``, or ``fp16`` or ``bf16`` for the messages of gradients and weights.
            Sums that are handed from rank to rank are made in the model's own type, those of
            collectives in 16 bits. The rank that updates a stage keeps its exact weights; other
            ranks compute with rounded ones. Weights that they predict d steps ahead have up to
            1 + 2d times the rounding error. ``int8``, ``int4``, ``topk`` or ``low_rank``: of what
            is handed from rank to rank; see :mod:`toolkit.runtime.rank_compression`.
        boundary_compression: ``none``, or ``bf16``, ``int8`` or ``int4`` for activations and their
            gradients that go from rank to rank; see :mod:`toolkit.runtime.boundary_codes`.
        per_machine: consecutive ranks on a machine, for all-reduces within each machine before
            those between machines; 0: the backend's own all-reduce.
        pacing: whether each rank spreads what it sends, in small chunks, over the training step.
        width: number of devices of a rank, each a process of its own: process ``rank * width + t``
            is device t. Or a ``DeviceMesh`` of all processes with dimensions ``("schedule",
            "tensor")``. With more than one, weights of ``stages.model`` are local shards during
            training, and :meth:`module` and states have whole tensors.
        parallelize: shards the modules of a stage over a mesh of the devices of a rank, as torch's
            ``parallelize_module`` does by a plan. Parameters have their names in the whole model.
            It is called with copies of the stage on the meta device. Scores are whole on every
            device, unless it is a :class:`toolkit.model.loss_parallel.LossParallel`.

    Attributes:
        n_recorded: training steps that have been measured.

    Raises:
        UserError: stages, schedule and ranks do not fit, or an option has no such value.
    """

    record: int = 0
    overlap: bool = True
    chunk_mb: float | None = None
    compression: str = "none"
    boundary_compression: str = "none"
    per_machine: int = 0
    pacing: bool = False
    width: int | DeviceMesh = 1
    parallelize: columns.Parallelize | None = None

    knows_costs = True
    _overlaps = True
    _same_sized = True
    _follows_schedule = True
    _way_out = "start the ranks again"  # since messages are still under way

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, (*MESSAGE_DTYPES, *MESSAGE_CODES))
        self._gradient_code = MESSAGE_CODES.get(self.compression)
        whole(self.per_machine, "per_machine", 0)
        if self.chunk_mb is not None and not 0 < self.chunk_mb < inf:
            raise UserError(
                f"chunk_mb: got {self.chunk_mb}; expected MB above 0, such as 1 to 4"
            )
        self._row: DeviceRow | None = None
        check_width(
            self._devices_per_rank(),
            self.compression,
            self.options,
            is_parallelized=self.parallelize is not None,
        )
        super().__post_init__()
        if self._devices_per_rank() > 1:
            self._join_row()
        self._updaters = self._runners = self._make_runners()
        # Before the weight store, which empties weights: shapes are those of the model.
        self._layouts = RankLayouts(
            self.world,
            self._runners,
            MESSAGE_DTYPES.get(self.compression),
            self._compressors,
            self._boundary_codes,
            self._row,
        )
        self._chunk_bytes = largest_chunk(
            self.chunk_mb, self.world.backend, paced=self.pacing
        )
        # Now, too, before weights are empty.
        self._stage_bytes = []
        for runner in self._runners:
            weight_bytes = [weight.nbytes for weight in runner.masters.values()]
            self._stage_bytes.append(sum(weight_bytes))
        self._weight_store = WeightStore(
            self.world, self.stages, self.schedule, self._runners
        )
        self._make_compressors([self.rank], self._weight_store.versions)
        self._stopwatch: Stopwatch | None = None
        self._meter: Meter | None = None
        if self.record:
            self._meter = Meter(
                self.rank, self.world.device, self.world.common_moment()
            )
        self.n_recorded = 0

    # The devices of a rank.

    def _devices_per_rank(self) -> int:
        return columns.width_of(self.width)

    def _join_row(self) -> None:
        """Take the place of this process in its column and row, and shard the stages."""
        # Only here: to import torch's DTensors takes a second.
        from toolkit.runtime.device_rows import DeviceRow, check_rows

        self.world = column = columns.column(self.world, self.width)
        check_rows(column, self.schedule, self.seed, self.options, self.stages)
        self.knows_costs = False
        self._row = DeviceRow(
            column, self.stages, cast(columns.Parallelize, self.parallelize)
        )
        self._loss = self._row.loss(self._loss)

    @property
    def writes(self) -> bool:
        """Whether this process writes files for all; see :meth:`Runtime.writes`."""
        return self.rank == 0 and self.is_first_device

    @property
    def is_first_device(self) -> bool:
        """Whether this process is the first device of its rank, or the only one."""
        return self._row is None or self._row.row.device_index == 0

    def _sharded_stage(self, index: int) -> "ShardedStage | None":
        if self._row is None:
            return None
        return self._row.stages[index]

    # Training.

    def _steps(self, source: BatchReader) -> Steps:
        assert source.n_steps is not None  # known, since steps overlap
        # No message is under way once a run has ended.
        self.world.use(self, lambda: None)
        n_read = len(self._reads(self.steps_done))
        trial = LossTrial(self._loss, source, n_read)
        layouts = self._find_layouts(source.shape, trial)
        microbatches = MicrobatchQueue(source, self.steps_done, self._reads)
        end = self.steps_done + source.n_steps
        with self._messages(layouts) as messages:
            while self.steps_done < end:
                n_steps = max(1, WINDOW // len(self.schedule.timing.starts))
                n_steps = min(n_steps, end - self.steps_done)
                # Measured steps have a program of their own.
                if self.n_recorded < self.record:
                    n_steps = min(n_steps, self.record - self.n_recorded)
                program = self.schedule.lower(n_steps, self.steps_done).verify()
                yield from self._run(program, microbatches, messages)
                self.steps_done = program.steps.stop
        microbatches.skip_to(self.steps_done)

    def _run(
        self, program: Program, microbatches: MicrobatchQueue, messages: Messages
    ) -> Steps:
        """Train by ``program``."""
        rank = self._begin(program, microbatches, messages, self._loss)
        meter = self._meter if self.n_recorded < self.record else None
        if meter is not None:
            rank.watching = meter.activations.watch
            meter.begin(rank)
            meter.stopwatch = self._stopwatch
        make = Executor if self._row is None else RowExecutor
        executor = make(
            rank, messages, program, meter or self._stopwatch, overlap=self.overlap
        )
        for i in executor.run(executor.ends):
            yield microbatches.result(cast(int, i.step))
        if meter is not None:
            meter.finish(program)
            self.n_recorded += program.n_steps
        self.world.watch.at("between programs")

    def _messages(self, layouts: Layouts) -> Messages:
        return Messages(
            self.world,
            layouts,
            self._chunk_bytes,
            paced=self.pacing,
            per_machine=self.per_machine,
        )

    def _begin(
        self,
        program: Program,
        microbatches: MicrobatchSource,
        messages: Messages,
        loss: Loss | None,
    ) -> Rank:
        """Return this rank's buffers at the start of ``program``. Every rank calls it."""
        # Every rank makes all groups, also those of others, in one order: torch requires it.
        groups, pairs = groups_and_pairs(program, self.per_machine)
        self.world.make_groups(groups, pairs)
        # In full: a message of codes may be the difference to a version that a rank lacks here.
        first_weights = self._weight_store.share(
            messages.of_exact_weights(), program.first_step
        )
        runners = dict(enumerate(self._runners))
        updaters = {stage: self._runners[stage] for stage in self.updated_stages}
        rank = Rank(
            program, runners, updaters, self._weight_store.versions, loss, microbatches
        )
        rank.weights = first_weights
        rank.compressor = self._compressors.get(self.rank)
        return rank

    def _go_over(self, schedule: Schedule) -> None:
        # Only what a rank lacks travels, not the whole state as between other runtimes.
        if self._row is not None:
            super()._go_over(schedule)
            return
        local_state = self._local_state_of(self.updated_stages)
        # Before the schedule changes: the owners of now hand over to those of then.
        state = self._weight_store.handed_over(self.schedule_plan, local_state)
        self._adopt(schedule)
        self._load(state)

    def _adopt(self, schedule: Schedule) -> None:
        self._weight_store.allocate()
        super()._adopt(schedule)
        self._weight_store = WeightStore(
            self.world, self.stages, schedule, self._runners, loads=True
        )

    # Weights and states.

    def module(self) -> nn.Module:
        """Return the whole model, which takes memory until the next :meth:`run`."""
        self._check_ended()
        self._weight_store.collect()
        if self._row is not None:
            return self._row.fill(self._runners)
        return self.stages.model

    def averages(self) -> Weights:
        """Return the averages of all stages; see :meth:`Runtime.averages`."""
        self._check_ended()
        averages = self._weight_store.averages()
        if self._row is not None:
            return self._row.whole_averages(averages)
        return averages

    @property
    def updated_stages(self) -> list[int]:
        """The stages that this rank updates."""
        return self._weight_store.updated

    def _owned_stages(self) -> list[int]:
        """Return the stages whose state this rank adds: one rank does for each."""
        return [
            stage
            for stage in self.updated_stages
            if self.schedule.owners[stage] == self.rank
        ]

    def _local_state(self) -> dict[str, Any]:
        local_state = self._local_state_of(self._owned_stages())
        if self._row is not None:
            return self._row.whole_state(local_state)
        return local_state | ranks_state(self._compressors)

    def _local_state_of(self, stages: Collection[int]) -> dict[str, Any]:
        return local_state_of(
            self.steps_done,
            self.stages,
            self._runners,
            self._weight_store.versions,
            stages,
            is_rank_zero=self.rank == 0,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        # Messages of an abandoned run would be taken for those of the next.
        self._check_ended()
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if self._row is not None:
            state = self._row.local_state(state, self._runners, self.updated_stages)
        self._weight_store.load(state)
        for stage in self.updated_stages:
            self._runners[stage].load(state["stages"][stage])
        load_ranks_state(self._compressors, state, self._weight_store.versions)

    # What it measures.

    @property
    def measures(self) -> bool:
        """Whether training steps have been measured; see ``record``."""
        return self.n_recorded > 0

    def measurements(self) -> Measurements:
        """Return what all ranks measured in the recorded steps. Every rank calls it."""
        self._check_ended()
        if self._meter is None or self.n_recorded == 0:
            raise UserError(
                "nothing was measured: make Distributed with record=STEPS, then train"
            )
        updaters = [self._runners[stage] for stage in self.updated_stages]
        self._meter.note_optimizers(updater.optimizer for updater in updaters)
        return Measurements(
            self.schedule_plan,
            self.world.gather(self._meter.record, "measurements"),
            self._stage_bytes,
        )

    def time_costs(self, n_steps: int) -> None:
        """Time the ops of the next ``n_steps``."""
        self._stopwatch = Stopwatch(self.world.device, self.steps_done + n_steps)

    def costs(self) -> tuple[Costs, Hardware]:
        """Return costs just measured; see :meth:`Runtime.costs`."""
        self._check_ended()
        if self._row is not None:
            raise UserError(
                "costs of ranks of several devices are not measured: use width=1"
            )
        op_seconds = self._stopwatch.medians() if self._stopwatch else {}
        op_seconds_of_ranks = self.world.gather(op_seconds, "times of ops")
        if not all(op_seconds_of_ranks):
            raise UserError("no op was timed: call time_costs(n_steps), then train")
        mean_stage_bytes = sum(self._stage_bytes) / len(self._stage_bytes)
        links = probe_links(self.world, mean_stage_bytes)
        return running_costs(op_seconds_of_ranks, self._layouts.last_found, *links)

    # Micro-batches.

    def _reads(self, step: int) -> list[int]:
        return microbatches_read(self.schedule_plan, self.rank, step)

    def _find_layouts(
        self, shape: Shape | None, trial: LossTrial | None = None
    ) -> Layouts:
        computed_stages = [
            stage
            for stage in range(len(self.stages))
            if self.rank in self.schedule.layout.ranks(stage)
        ]
        return self._layouts.find(shape, computed_stages, self.updated_stages, trial)

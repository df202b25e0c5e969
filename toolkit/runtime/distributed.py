"""One rank of a schedule's program, on torch.distributed; each rank is a process."""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from toolkit.cost import Costs, Hardware
from toolkit.errors import UserError, check_choice, whole
from toolkit.model.analysis import differentiable, meta_copy
from toolkit.model.trace import kept_generators
from toolkit.runtime.base import Steps
from toolkit.runtime.executor import Executor
from toolkit.runtime.local_runtime import OnRanks
from toolkit.runtime.message_layout import COMPRESSIONS, Layout, Layouts, find_layouts
from toolkit.runtime.message_transfer import Messages, groups_and_pairs, largest_chunk
from toolkit.runtime.meters.measurements import Measurements, Meter
from toolkit.runtime.meters.running_costs import Stopwatch, probe_links, running_costs
from toolkit.runtime.microbatches import BatchReader, MicrobatchQueue, Shape
from toolkit.runtime.rank import Feed, Rank
from toolkit.runtime.stage import StageRunner, Values, leaves
from toolkit.runtime.state import local_state_of
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import Weights
from toolkit.runtime.weight_store import WeightStore
from toolkit.schedule import Action, Instruction, Program, Schedule

_WINDOW = 50_000  # ops of the training steps that are lowered at once
_FIRST_WINDOW = 5_000  # likewise, while a caller waits for a first result


class Pause(NamedTuple):
    """Where the caller's code acts: after the op that ends a forward or a backward of a pass."""

    rank: Rank
    op: Instruction


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
            1 + 2d times the rounding error.
        per_machine: consecutive ranks on a machine, for all-reduces within each machine before
            those between machines; 0: the backend's own all-reduce.
        pacing: whether each rank spreads what it sends over the training step, in chunks: the
            smaller they are, the more even the load.

    Attributes:
        n_recorded: training steps that have been measured.

    Raises:
        UserError: stages, schedule and ranks do not fit, or an option has no such value.
    """

    record: int = 0
    overlap: bool = True
    chunk_mb: float | None = None
    compression: str = "none"
    per_machine: int = 0
    pacing: bool = False

    knows_costs = True
    _overlaps = _same_sized = True
    _way_out = "start the ranks again"  # since messages are still under way

    def __post_init__(self) -> None:
        check_choice("compression", self.compression, COMPRESSIONS)
        whole(self.per_machine, "per_machine", 0)
        if self.chunk_mb is not None and not 0 < self.chunk_mb < inf:
            raise UserError(f"chunk_mb: got {self.chunk_mb}; expected MB above 0, such as 1 to 4")
        super().__post_init__()
        self._updaters = self._runners = self._make_runners()
        self._skeletons = [meta_copy(runner.compute) for runner in self._runners]
        self._layouts: dict[Shape, Layouts] = {}
        self._chunk_bytes = largest_chunk(self.chunk_mb, self.world.backend, paced=self.pacing)
        masters = [runner.masters.values() for runner in self._runners]
        self._stage_bytes = [sum(x.nbytes for x in stage) for stage in masters]
        self._weight_store = WeightStore(self.world, self.stages, self.schedule, self._runners)
        self._stopwatch: Stopwatch | None = None
        self._meter: Meter | None = None
        if self.record:
            self._meter = Meter(self.rank, self.world.device, self.world.common_moment())
        self.n_recorded = 0
        self._stepping: Executor | None = None  # of the program of stepwise()
        self._stepping_rank: Rank | None = None
        self._kept_buffers: dict[str, Tensor] = {}  # of an evaluation
        self.updates_wait = False  # in stepwise(), until allow_updates()

    def _steps(self, source: BatchReader) -> Steps:
        assert source.n_steps is not None  # known, since steps overlap
        self.world.use(self, lambda: None)
        layouts = self._find_layouts(source.shape, source)
        feed = MicrobatchQueue(source, self.steps_done, self._reads)
        end = self.steps_done + source.n_steps
        window = max(1, _WINDOW // len(self.schedule.timing.starts))
        with self._messages(layouts) as messages:
            while (steps_left := end - self.steps_done) > 0:
                length = min(window, steps_left, self.record - self.n_recorded or steps_left)
                program = self.schedule.lower(length, self.steps_done).verify()
                yield from self._run(program, feed, messages)
                self.steps_done = program.steps.stop
        feed.skip_to(self.steps_done)

    def _run(self, program: Program, feed: MicrobatchQueue, messages: Messages) -> Steps:
        """Train by ``program``."""
        rank = self._begin(program, feed, messages, self._loss)
        meter = self._meter if self.n_recorded < self.record else None
        if meter is not None:
            rank.watching = meter.activations.watch
            meter.begin(rank)
            meter.stopwatch = self._stopwatch
        executor = Executor(rank, messages, program, meter or self._stopwatch, overlap=self.overlap)
        for i in executor.run(executor.ends):
            yield feed.result(cast(int, i.step))
        if meter is not None:
            meter.finish(program)
            self.n_recorded += program.n_steps
        self.world.watch.at("between programs")

    def stepwise(
        self, feed: Feed, shape: Shape, *, counted: bool = False
    ) -> Generator["Pause", bool | None, None]:
        """Train without a loss and without known end; pause after each forward and backward.

        After the forward of a micro-batch the caller takes its outputs from the rank, and gives
        their gradients; see :class:`Rank`. ``send(True)``, on all ranks after the same training
        step, completes that and ends.

        Args:
            feed: inputs of this rank's micro-batches.
            shape: shape and type of each input of the first.
            counted: whether counts of the loss come with the gradients.
        """
        self._check_ended()
        layouts = self._find_layouts(shape)
        if counted:
            layouts = layouts.with_counts()
        ending: bool | None = False
        window = _FIRST_WINDOW
        while not ending:
            self._use_schedule_of(self.steps_done)
            length = max(1, window // len(self.schedule.timing.starts))
            window = min(2 * window, _WINDOW)
            if (change := self.schedule_plan.next_change(self.steps_done)) is not None:
                length = min(length, change - self.steps_done)
            program = self.schedule.lower(length, self.steps_done).verify()
            with self._messages(layouts) as messages:
                rank = self._begin(program, feed, messages, None)
                rank.next_step = program.first_step  # what is read from there on is kept
                executor = Executor(
                    rank,
                    messages,
                    program,
                    None,
                    overlap=self.overlap,
                    stepwise=True,
                    update_limit=program.first_step - 1 if self.updates_wait else inf,
                )
                self._stepping = executor
                self._stepping_rank = rank
                for op in executor.run(_ends_of_passes(program.ranks[self.rank])):
                    if op.action != Action.FORWARD:
                        rank.next_step = cast(int, op.step) + 1
                    if ending := (yield Pause(rank, op)):
                        executor.end_here()
            self.steps_done = rank.next_step
        self.world.watch.at("between programs")

    # Between the training steps of stepwise().

    def allow_updates(self, step: int) -> None:
        """Let the updates of training step ``step`` begin; see ``updates_wait``."""
        if self._stepping is not None:
            self._stepping.allow_updates(step, step if self.updates_wait else inf)

    def await_updates(self, steps_done: int) -> None:
        """Wait until this rank has made the updates of the first ``steps_done`` steps."""
        if self._stepping is not None:
            self._stepping.await_updates(steps_done - 1)
            self.world.finish_computing()

    @property
    def has_whole_gradients(self) -> bool:
        """Whether this rank has the gradients of all stages before their updates."""
        return self.overlap and self.updates_wait and len(self.updated_stages) == len(self.stages)

    def whole_gradients(self, step: int) -> list[tuple[dict[str, nn.Parameter], Weights]]:
        """Return each stage's parameters, and their gradients at ``step``, by name.

        Gradients may be changed in place. A parameter may have none.

        Waits for all ranks' parts; see :attr:`has_whole_gradients`.
        """
        assert self._stepping is not None
        assert self._stepping_rank is not None
        self._stepping.await_sums(step)
        gradients = []
        for stage, runner in enumerate(self._runners):
            total = self._stepping_rank.sums[stage, step]
            total.divide_by_count(runner.masters)
            gradients_of_masters = {
                name: gradient for name, gradient in total.tensors.items() if name in runner.masters
            }
            gradients.append((runner.masters, gradients_of_masters))
        self.world.finish_computing()
        return gradients

    def has_version(self, steps_done: int) -> bool:
        """Whether this rank has updated its stages ``steps_done`` times."""
        return all(steps_done in versions for versions in self._weight_store.versions.values())

    def newest_of(self, stages: Collection[int], *, averaged: bool) -> dict[int, Weights]:
        """Return the newest weights, frozen weights and buffers of stages that this rank updates.

        Their number of updates is :meth:`has_version`'s. ``averaged``: with the averages of their
        optimizers, such as schedule-free's, in place of the weights that are trained.
        """
        self.world.finish_computing()
        newest = {}
        for stage in stages:
            newest[stage] = self._weight_store.newest(stage)
            newest[stage] |= {
                name: tensor for name, tensor in self._kept_buffers.items() if name in newest[stage]
            }
            if averaged:
                newest[stage] |= self._runners[stage].optimizer_averages(newest[stage])
        return newest

    def show_own(self, *, averaged: bool) -> None:
        """Put the newest weights of the stages that this rank updates into the model."""
        for stage, tensors in self.newest_of(self.updated_stages, averaged=averaged).items():
            for name, master in self._runners[stage].masters.items():
                master.data = tensors[name]

    def take_newest(self, newest: Mapping[int, Weights]) -> None:
        """Put weights and buffers of stages that other ranks update into the model."""
        for stage, tensors in newest.items():
            self._weight_store.take(stage, tensors)

    def release_newest(self) -> None:
        """Free the memory of :meth:`take_newest`; buffers stay."""
        self._weight_store.forget()
        self._kept_buffers = {}

    def local_state_after(self, steps_done: int) -> dict[str, Any]:
        """Return what this rank alone adds to the state after ``steps_done`` steps."""
        self.world.finish_computing()
        versions = {}
        for stage in self.updated_stages:
            # A version that is still to be freed, or to be read by a step under way, may be there.
            oldest = self.schedule.oldest_version(stage, steps_done)
            stage_versions = dict(self._weight_store.versions[stage])
            versions[stage] = {
                version: weights
                for version, weights in stage_versions.items()
                if oldest <= version <= steps_done
            }
        owned = [stage for stage in self.updated_stages if self.schedule.owners[stage] == self.rank]
        state = local_state_of(
            steps_done,
            self.stages,
            self._runners,
            versions,
            owned,
            is_rank_zero=self.rank == 0,
        )
        fixed = state["fixed"]
        return state | {
            "fixed": fixed
            | {name: self._kept_buffers.get(name, tensor) for name, tensor in fixed.items()}
        }

    def keep_buffers(self) -> None:
        """Copy the buffers: other ranks get the copies, whatever the script changes here."""
        if not self._kept_buffers:
            buffers = {
                name: buffer
                for stage in self.updated_stages
                for name, buffer in self.stages[stage].named_buffers()
            }
            self._kept_buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    def _messages(self, layouts: Layouts) -> Messages:
        message_arguments = self.world, layouts, self._chunk_bytes
        return Messages(*message_arguments, paced=self.pacing, per_machine=self.per_machine)

    def _begin(self, program: Program, feed: Feed, messages: Messages, loss: Loss | None) -> Rank:
        """Return this rank's buffers at the start of ``program``."""
        self.world.make_groups(*groups_and_pairs(program, self.per_machine))
        first_weights = self._weight_store.share(messages, program.first_step)
        runners, updaters = (
            dict(enumerate(self._runners)),
            {stage: self._runners[stage] for stage in self.updated_stages},
        )
        rank = Rank(program, runners, updaters, self._weight_store.versions, loss, feed)
        rank.weights = first_weights
        return rank

    def _go_over(self, schedule: Schedule) -> None:
        state = self._weight_store.handed_over(
            self.schedule_plan, self._local_state_of(self.updated_stages)
        )
        self._adopt(schedule)
        self._load(state)

    def _adopt(self, schedule: Schedule) -> None:
        self._weight_store.allocate()
        super()._adopt(schedule)
        store_arguments = self.world, self.stages, schedule, self._runners
        self._weight_store = WeightStore(*store_arguments, loads=True)

    def module(self) -> nn.Module:
        """Return the whole model, which takes memory until the next :meth:`run`."""
        self._check_ended()
        self._weight_store.collect()
        return self.stages.model

    def averages(self) -> Weights:
        """Return the averages of all stages; see :meth:`Runtime.averages`."""
        self._check_ended()
        return self._weight_store.averages()

    @property
    def measures(self) -> bool:
        """Whether training steps have been measured; see ``record``."""
        return self.n_recorded > 0

    def measurements(self) -> Measurements:
        """Return what all ranks measured in the recorded steps. Every rank calls it."""
        self._check_ended()
        if self._meter is None or self.n_recorded == 0:
            raise UserError("nothing was measured: make Distributed with record=STEPS, then train")
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
        op_seconds = self._stopwatch.medians() if self._stopwatch else {}
        op_seconds_of_ranks = self.world.gather(op_seconds, "times of ops")
        if not all(op_seconds_of_ranks):
            raise UserError("no op was timed: call time_costs(n_steps), then train")
        mean_stage_bytes = sum(self._stage_bytes) / len(self._stage_bytes)
        links = probe_links(self.world, mean_stage_bytes)
        return running_costs(op_seconds_of_ranks, next(reversed(self._layouts.values())), *links)

    @property
    def updated_stages(self) -> list[int]:
        """The stages that this rank updates."""
        return self._weight_store.updated

    @property
    def trained(self) -> list[list[str]]:
        """The names of the trained weights of each stage."""
        return [[*runner.masters] for runner in self._runners]

    def averaged_names(self, j: int) -> list[str]:
        """Return the names of what averages of stage ``j`` follow; see ``options.ema``."""
        return [*self._runners[j].averaged()]

    def _local_state(self) -> dict[str, Any]:
        return self._local_state_of(
            [stage for stage in self.updated_stages if self.schedule.owners[stage] == self.rank]
        )

    def _local_state_of(self, own: Collection[int]) -> dict[str, Any]:
        state_arguments = self.stages, self._runners, self._weight_store.versions, own
        return local_state_of(self.steps_done, *state_arguments, is_rank_zero=self.rank == 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        self._check_ended()  # messages of an abandoned run would be taken for those of the next
        super().load_state_dict(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._weight_store.load(state)
        for stage in self.updated_stages:
            self._runners[stage].load(state["stages"][stage])

    def _reads(self, step: int) -> list[int]:
        return microbatches_read(self.schedule_plan, self.rank, step)

    def _find_layouts(self, shape: Shape | None, source: BatchReader | None = None) -> Layouts:
        """Return the layouts for micro-batches of ``shape``, which not every rank has seen.

        ``source`` has batches on which the loss can be tried.
        """
        # Ranks that read no micro-batch learn the shape from the others.
        input_shape = next(
            rank_shape
            for rank_shape in self.world.gather(shape, "shapes of inputs")
            if rank_shape is not None
        )
        if input_shape in self._layouts:
            return self._layouts[input_shape]
        inputs = tuple(torch.empty(size, dtype=dtype, device="meta") for size, dtype in input_shape)
        device, wire_dtype = self.world.device, COMPRESSIONS[self.compression]
        with self.options.autocast(device):
            layouts = find_layouts(self._skeletons, inputs, wire_dtype, device)
        if self.world.backend == "nccl":
            self.world.watch.at("the first run of its stages")
            ranks = self.schedule.layout.ranks
            computed_stages = [
                stage for stage in range(len(self.stages)) if self.rank in ranks(stage)
            ]
            warm_up(self._runners, layouts, inputs, device, computed_stages, self.updated_stages)
        if source is not None and self._is_counted(layouts, source):
            layouts = layouts.with_counts()
        self._layouts[input_shape] = layouts
        return layouts

    def _is_counted(self, layouts: Layouts, source: BatchReader) -> bool:
        """Whether the loss returns a count, found by a call on outputs of zeros.

        Receivers have to know it before the first message. A loss that fails on zeros counts as a
        mean; if it is none, its first message is refused. Every rank calls it.
        """
        counted = False
        share = source.look()
        if share is not None:
            n_microbatches = len(self._reads(self.steps_done))
            targets = share[1].chunk(n_microbatches)[0]
            outputs = _zeros(layouts.activations[-1], self.world.device)
            # An error is raised again where the loss belongs: at a forward of the last stage.
            with torch.no_grad(), kept_generators(share[0]), suppress(Exception):
                counted = self._loss(tuple(outputs.values()), targets).count is not None
        return any(self.world.gather(counted, "kinds of loss"))


def microbatches_read(schedule_plan: Schedule, rank: int, step: int) -> list[int]:
    """Return the micro-batches whose inputs or targets a first or last stage on ``rank`` takes."""
    end_stages, microbatches = (0, schedule_plan.n_stages - 1), range(schedule_plan.n_microbatches)
    readers = (
        {schedule_plan.rank(stage, microbatch, step) for stage in end_stages}
        for microbatch in microbatches
    )
    return [microbatch for microbatch, ranks in enumerate(readers) if rank in ranks]


def _ends_of_passes(order: Sequence[Instruction]) -> set[int]:
    """Return the positions of each micro-batch's last forward and last backward in each step."""
    last_positions: dict[tuple, int] = {}
    for position, i in enumerate(order):
        if i.action.computes:
            last_positions[i.action == Action.FORWARD, i.step, i.microbatch] = position
    return {*last_positions.values()}


def warm_up(
    runners: Sequence[StageRunner],
    layouts: Layouts,
    inputs: Values,
    device: torch.device,
    computed: Collection[int],
    updated: Collection[int],
) -> None:
    """Run the ``computed`` stages on zeros, and update copies of weights; no state changes.

    CUDA's libraries and torch.compile load kernels at first use, and CUDA then waits for all that
    the GPU is doing. That may include an early receive from a rank that waits for this one: a
    deadlock. So every kernel is loaded before the first message.
    """
    passed_on: Values | None = None
    for stage, runner in enumerate(runners):
        if stage not in computed:
            passed_on = None
            continue
        if stage == 0:
            stage_inputs = tuple(torch.zeros_like(tensor, device=device) for tensor in inputs)
        else:
            activations = passed_on or _zeros(layouts.activations[stage - 1], device).values()
            stage_inputs = tuple(
                tensor.detach().requires_grad_(differentiable(tensor)) for tensor in activations
            )
        weights = runner.newest() if stage in updated else _zeros(layouts.weights[stage], device)
        passed_on = runner.forward(leaves(weights), stage_inputs, (0,), 0)
        roots = [tensor for tensor in passed_on if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.zeros_like(tensor) for tensor in roots])
        runner.take_statistics()
        if stage in updated:
            runner.form(updated=True, unused=())


def _zeros(layout: Layout, device: torch.device) -> dict[Any, Tensor]:
    """Return a received message of zeros, in the order of its places."""
    tensors = layout.unpack(torch.zeros(layout.n_bytes, dtype=torch.uint8, device=device))
    return {place: tensors[place] for place in sorted(tensors)}

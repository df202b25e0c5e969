"""Pipelines run by torch.distributed.pipelining."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleInterleavedZeroBubble,
)

from toolkit.errors import UserError
from toolkit.model.crossings import Boundary
from toolkit.runtime.baselines.baseline import Baseline, Released, describe
from toolkit.runtime.losses import COUNT, LossValue
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.process_group.world import World
from toolkit.runtime.stage import StageRunner, Values
from toolkit.runtime.state import load_model
from toolkit.runtime.updater import GradientSum, Updater
from toolkit.schedule import Op, Schedule, pipeline_orders

_MESSAGES = "messages of torch's pipeline"


class TorchPipelining(Baseline):
    """A pipeline run by torch.distributed.pipelining.

    Batch norms keep this toolkit's contract: each micro-batch is normalised by its own
    statistics, and running statistics advance once a step. While it trains, a rank's parameters
    of other ranks' stages are empty; :meth:`module` fills them.

    The schedule is ``catalog.gpipe``, ``one_f_one_b``, ``interleaved_1f1b`` or ``zero_bubble``, or
    any other whose ranks run their ops in the same order; of the options only precision may be
    set, to fp32 or tf32. Arguments are those of :class:`Baseline`.

    Raises:
        UserError: torch has no such schedule, or cannot send what crosses the stages.
    """

    runtime = "torch_pipelining"
    _all_save = True

    def _check_options(self, schedule: Schedule) -> None:
        self.options.check_only(self.runtime, "precision")
        if self.options.autocasts:
            raise UserError(
                f"runtime=torch_pipelining takes no precision={self.options.precision}: use fp32 or"
                " tf32, or runtime=distributed"
            )
        for boundary in (tensor for crossing in self.stages.boundaries[1:] for tensor in crossing):
            if not boundary.dtype.is_floating_point:
                raise UserError(
                    "runtime=torch_pipelining sends a gradient back for every tensor that crosses"
                    f" stages, and {boundary.name} is of {boundary.dtype}: cut the model where"
                    " none such crosses"
                )

    def _build(self) -> Sequence[Updater]:
        self._check_no_gloo_on_gpus()
        # Other ranks' stages get no gradients here; their learning rates keep in step.
        self._runners = self._make_runners()
        self._owners = [self.schedule.rank(index, 0) for index in range(len(self.stages))]
        self._own = [index for index, owner in enumerate(self._owners) if owner == self.rank]
        last_stage, splits = len(self.stages) - 1, self.schedule.splits_backward
        self._parts = [
            _Part(self._runners[index], self.world, index == last_stage, splits)
            for index in self._own
        ]
        other_stages = [stage for index, stage in enumerate(self.stages) if index not in self._own]
        self._released = Released(
            parameter for stage in other_stages for parameter in stage.parameters()
        )
        self._runner: Any = None
        self._size = 0
        return self._runners

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError unless torch.distributed.pipelining has ``schedule``."""
        _torch_schedule(schedule)

    @torch.no_grad()
    def module(self) -> nn.Module:
        """Return the whole model, from the ranks of its stages. Every rank calls it."""
        self._released.restore()
        for stage, owner in zip(self.stages, self._owners, strict=True):
            with self.world.watch.waiting(f"the weights of rank {owner}", [owner]):
                for tensor in (*stage.parameters(), *stage.buffers()):
                    dist.broadcast(tensor.data, owner, self.world.group)
        return self.stages.model

    @property
    def updated_stages(self) -> list[int]:
        """The stages that this rank updates."""
        return self._own

    def _load(self, state: Mapping[str, Any]) -> None:
        self._released.restore()
        load_model(state, self.stages, self._runners, self._own)
        for index, (runner, stage_state) in enumerate(
            zip(self._runners, state["stages"], strict=True)
        ):
            if index not in self._own and stage_state["optimizer"] is not None:
                stage_state = stage_state | {"optimizer": stage_state["optimizer"] | {"state": {}}}
            runner.load(stage_state)

    def _reads(self, step: int) -> Sequence[int]:
        return range(self.schedule.n_microbatches)

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        n_microbatches = self.schedule.n_microbatches
        self._released.release()
        self._fit_to(len(targets) // n_microbatches)
        for stage_part in self._parts:
            stage_part.begin(step)
        has_last_stage = len(self.stages) - 1 in self._own
        losses: list[Tensor] = []
        self._values: list[LossValue] = []
        with self.world.watch.waiting(_MESSAGES, self._everyone):
            outputs = self._runner.step(
                *(inputs if 0 in self._own else ()),
                target=targets if has_last_stage else None,
                losses=losses if has_last_stage else None,
            )
        counts = [value.count for value in self._values if value.count is not None]
        count = self._total_count(counts)
        for runner in self._runners:
            gradients = {name: master.grad for name, master in runner.masters.items()}
            total = GradientSum()
            total.add(
                {name: gradient for name, gradient in gradients.items() if gradient is not None}
            )
            total.add(runner.take_statistics())
            if count is not None:
                total.add({COUNT: count})
            runner.update(total, n_microbatches, keep_old=False)
        if has_last_stage:
            means = torch.stack([value.mean() for value in self._values])
            all_counts = torch.stack(counts) if counts else None
            return StepResult(
                step, tuple(range(n_microbatches)), means, outputs.detach(), counts=all_counts
            )
        output, device = self.stages.output, self.world.device
        no_samples = torch.empty(0, *output.shape[1:], dtype=output.dtype, device=device)
        return StepResult(step, (), no_samples.new_empty(0), no_samples)

    def _microbatch_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return where torch's backward of a micro-batch begins."""
        value = self._loss(outputs, targets)
        self._values.append(value)
        n_microbatches = self.schedule.n_microbatches
        return value.root(n_microbatches, 1.0) * n_microbatches  # torch divides the gradients by n

    def _total_count(self, counts: Sequence[Tensor]) -> Tensor | None:
        """Return the sum of the last stage's counts, on every rank; None if there are none."""
        has_last_stage = len(self.stages) - 1 in self._own
        flags = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        if has_last_stage and counts:
            flags = torch.stack([torch.stack([*counts]).sum(), torch.ones_like(counts[0])])
        total, n_counted = self.total(flags)
        return total if n_counted else None

    def _fit_to(self, size: int) -> None:
        """Make torch's schedule for micro-batches of ``size`` samples, unless made before."""
        if size == self._size:
            return
        self._size = size
        edges = [*self.stages.boundaries, (self.stages.output,)]
        stages: Any = [
            PipelineStage(
                stage_part,
                index,
                len(self.stages),
                self.world.device,
                input_args=_like(edges[index], size, trained=index > 0),
                output_args=_like(edges[index + 1], size, trained=True),
                group=self.world.group,
            )
            for index, stage_part in zip(self._own, self._parts, strict=True)
        ]
        make = _torch_schedule(self.schedule)
        if issubclass(make, PipelineScheduleSingle):
            (stages,) = stages
        self._runner = make(stages, self.schedule.n_microbatches, self._microbatch_loss)


class _Part(nn.Module):
    """A stage, as torch's schedule calls it: the micro-batches in order, each once a step."""

    def __init__(self, runner: StageRunner, world: World, last: bool, split: bool) -> None:
        super().__init__()
        self.world = world
        self.runner = runner
        self.last = last
        self.split = split
        self.compute = runner.compute

    def begin(self, step: int) -> None:
        self.step = step
        self.next = 0

    def forward(self, *inputs: Tensor) -> Tensor | Values:
        microbatch, self.next = self.next, self.next + 1
        weights: dict[str, Tensor] = dict(self.runner.masters)
        # A position without peers: an error here is the model's, not the backend's.
        self.world.watch.at(f"{self.runner.index}F{microbatch}", self.step)
        outputs = self.runner.forward(weights, inputs, (microbatch,), self.step)
        self.world.watch.at(_MESSAGES, self.step, range(self.world.size))
        if self.split:
            outputs = tuple(_own(output, inputs) for output in outputs)
        return outputs[0] if self.last else outputs


def _own(output: Tensor, inputs: Values) -> Tensor:
    """Return ``output``, or a copy if it shares memory: torch detaches it in place."""
    shared = output._is_view() or any(output is tensor for tensor in inputs)
    return output.clone() if shared else output


def rank_orders(schedule: Schedule) -> list[list[Op]]:
    """Return the ops of one step on each rank, in order."""
    starts = schedule.timing.starts
    orders: list[list[Op]] = [[] for _ in range(schedule.n_ranks)]
    for op in sorted(starts, key=starts.__getitem__):
        orders[schedule.rank(op.stage, op.microbatch)].append(op)
    return orders


def _torch_schedule(schedule: Schedule) -> type:
    """Return torch's schedule with the same orders."""
    n_stages, n_microbatches, n_ranks = schedule.n_stages, schedule.n_microbatches, schedule.n_ranks
    equal_rounds = n_microbatches % max(1, n_microbatches // n_ranks) == 0
    interleaved = partial(pipeline_orders.interleaved_1f1b, n_ranks=n_ranks)
    own_orders = rank_orders(schedule)
    for fits, orders, torch_schedule in (
        (n_stages == n_ranks, pipeline_orders.gpipe, ScheduleGPipe),
        (n_stages == n_ranks <= n_microbatches, pipeline_orders.one_f_one_b, Schedule1F1B),
        (
            n_stages == n_ranks and equal_rounds,
            pipeline_orders.zero_bubble,
            ScheduleInterleavedZeroBubble,
        ),
        (
            n_stages > n_ranks and n_stages % n_ranks == 0 and equal_rounds,
            interleaved,
            ScheduleInterleaved1F1B,
        ),
    ):
        can_match = fits and schedule.max_staleness == 0 and schedule.state == "replicated"
        if can_match and own_orders == [list(ops) for ops in orders(n_stages, n_microbatches)]:
            return torch_schedule
    raise UserError(
        "runtime=torch_pipelining runs what torch.distributed.pipelining has: schedule=gpipe;"
        " one_f_one_b with a micro-batch a stage or more; interleaved_1f1b with several stages a"
        " rank; zero_bubble with a multiple of the ranks as micro-batches"
        f" (got {describe(schedule)})"
    )


def _like(crossing: tuple[Boundary, ...], size: int, *, trained: bool) -> Values:
    def like(boundary: Boundary) -> Tensor:
        n_rows = size if boundary.batched else 1
        empty = torch.empty((n_rows, *boundary.shape[1:]), dtype=boundary.dtype, device="meta")
        return empty.requires_grad_(trained and boundary.dtype.is_floating_point)

    return tuple(map(like, crossing))

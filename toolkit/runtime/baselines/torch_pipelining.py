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
from toolkit.runtime.process_group.join import World
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
        self._owners = [self.schedule.rank(j, 0) for j in range(len(self.stages))]
        self._own = [j for j, owner in enumerate(self._owners) if owner == self.rank]
        last, split = len(self.stages) - 1, self.schedule.splits_backward
        self._parts = [_Part(self._runners[j], self.world, j == last, split) for j in self._own]
        others = [stage for j, stage in enumerate(self.stages) if j not in self._own]
        self._released = Released(p for stage in others for p in stage.parameters())
        self._runner: Any = None
        self._size = 0
        return self._runners

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError unless torch.distributed.pipelining has ``schedule``."""
        _torch_schedule(schedule)

    @torch.no_grad()
    def _module(self) -> nn.Module:
        self._released.restore()
        for stage, owner in zip(self.stages, self._owners, strict=True):
            with self.world.watch.waiting(f"the weights of rank {owner}", [owner]):
                for tensor in (*stage.parameters(), *stage.buffers()):
                    dist.broadcast(tensor.data, owner, self.world.group)
        return self.stages.model

    @property
    def own(self) -> list[int]:
        """The stages that this rank updates."""
        return self._own

    def _load(self, state: Mapping[str, Any]) -> None:
        self._released.restore()
        load_model(state, self.stages, self._runners, self._own)
        for j, (runner, found) in enumerate(zip(self._runners, state["stages"], strict=True)):
            if j not in self._own and found["optimizer"] is not None:
                found = found | {"optimizer": found["optimizer"] | {"state": {}}}
            runner.load(found)

    def _reads(self, step: int) -> Sequence[int]:
        return range(self.schedule.n_microbatches)

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        n = self.schedule.n_microbatches
        self._released.release()
        self._fit_to(len(targets) // n)
        for part in self._parts:
            part.begin(step)
        last = len(self.stages) - 1 in self._own
        losses: list[Tensor] = []
        self._values: list[LossValue] = []
        with self.world.watch.waiting(_MESSAGES, self._everyone):
            outputs = self._runner.step(
                *(inputs if 0 in self._own else ()),
                target=targets if last else None,
                losses=losses if last else None,
            )
        counts = [value.count for value in self._values if value.count is not None]
        count = self._total_count(counts)
        for runner in self._runners:
            found = {name: master.grad for name, master in runner.masters.items()}
            total = GradientSum()
            total.add({name: grad for name, grad in found.items() if grad is not None})
            total.add(runner.take_statistics())
            if count is not None:
                total.add({COUNT: count})
            runner.update(total, n, keep_old=False)
        if last:
            means = torch.stack([value.mean() for value in self._values])
            counted = torch.stack(counts) if counts else None
            return StepResult(step, tuple(range(n)), means, outputs.detach(), counts=counted)
        output, device = self.stages.output, self.world.device
        nothing = torch.empty(0, *output.shape[1:], dtype=output.dtype, device=device)
        return StepResult(step, (), nothing.new_empty(0), nothing)

    def _microbatch_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return where torch's backward of a micro-batch begins."""
        value = self._loss(outputs, targets)
        self._values.append(value)
        n = self.schedule.n_microbatches
        return value.root(n, 1.0) * n  # torch divides the gradients by n

    def _total_count(self, counts: Sequence[Tensor]) -> Tensor | None:
        """Return the sum of the last stage's counts, on every rank; None if there are none."""
        last = len(self.stages) - 1 in self._own
        flags = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        if last and counts:
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
                part,
                j,
                len(self.stages),
                self.world.device,
                input_args=_like(edges[j], size, trained=j > 0),
                output_args=_like(edges[j + 1], size, trained=True),
                group=self.world.group,
            )
            for j, part in zip(self._own, self._parts, strict=True)
        ]
        make = _torch_schedule(self.schedule)
        if issubclass(make, PipelineScheduleSingle):
            (stages,) = stages
        self._runner = make(stages, self.schedule.n_microbatches, self._microbatch_loss)


class _Part(nn.Module):
    """A stage, as torch's schedule calls it: the micro-batches in order, each once a step."""

    def __init__(self, runner: StageRunner, world: World, last: bool, split: bool) -> None:
        super().__init__()
        self.world, self.runner, self.last, self.split = world, runner, last, split
        self.compute = runner.compute

    def begin(self, step: int) -> None:
        self.step, self.next = step, 0

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
    found: list[list[Op]] = [[] for _ in range(schedule.n_ranks)]
    for op in sorted(starts, key=starts.__getitem__):
        found[schedule.rank(op.stage, op.microbatch)].append(op)
    return found


def _torch_schedule(schedule: Schedule) -> type:
    """Return torch's schedule with the same orders."""
    s, m, n_ranks = schedule.n_stages, schedule.n_microbatches, schedule.n_ranks
    equal_rounds = m % max(1, m // n_ranks) == 0
    interleaved = partial(pipeline_orders.interleaved_1f1b, n_ranks=n_ranks)
    own = rank_orders(schedule)
    for possible, orders, theirs in (
        (s == n_ranks, pipeline_orders.gpipe, ScheduleGPipe),
        (s == n_ranks <= m, pipeline_orders.one_f_one_b, Schedule1F1B),
        (s == n_ranks and equal_rounds, pipeline_orders.zero_bubble, ScheduleInterleavedZeroBubble),
        (s > n_ranks and s % n_ranks == 0 and equal_rounds, interleaved, ScheduleInterleaved1F1B),
    ):
        current = possible and schedule.max_staleness == 0 and schedule.state == "replicated"
        if current and own == [list(ops) for ops in orders(s, m)]:
            return theirs
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

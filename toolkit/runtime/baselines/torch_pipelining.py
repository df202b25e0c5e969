"""Pipelines run by torch.distributed.pipelining."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
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
from toolkit.runtime.baselines.baseline import (
    Baseline,
    ReleasedParameters,
    describe_ranks,
)
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
        for crossing in chain.from_iterable(self.stages.boundaries[1:]):
            if not crossing.dtype.is_floating_point:
                raise UserError(
                    "runtime=torch_pipelining sends a gradient back for every tensor that crosses"
                    f" stages, and {crossing.name} is of {crossing.dtype}: cut the model where"
                    " none such crosses"
                )

    def _build(self) -> Sequence[Updater]:
        self._check_no_gloo_on_gpus()
        # Other ranks' stages get no gradients here; their learning rates keep in step.
        self._runners = self._make_runners()
        last_stage = len(self.stages) - 1
        splits_backward = self.schedule.splits_backward
        self._owners = [
            self.schedule.rank(stage, 0) for stage in range(len(self.stages))
        ]
        self._modules: dict[int, _StageModule] = {}  # by stage, of this rank
        other_parameters: list[nn.Parameter] = []
        for stage, owner in enumerate(self._owners):
            if owner == self.rank:
                self._modules[stage] = _StageModule(
                    self._runners[stage],
                    self.world,
                    stage == last_stage,
                    splits_backward,
                )
            else:
                other_parameters += self.stages[stage].parameters()
        self._has_last_stage = last_stage in self._modules
        self._released = ReleasedParameters(other_parameters)
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
        return [*self._modules]

    def _load(self, state: Mapping[str, Any]) -> None:
        self._released.restore()
        load_model(state, self.stages, self._runners, self.updated_stages)
        stage_states = zip(self._runners, state["stages"], strict=True)
        for stage, (runner, stage_state) in enumerate(stage_states):
            optimizer_state = stage_state["optimizer"]
            if stage not in self._modules and optimizer_state is not None:
                # The state of other ranks' optimizers may be meta tensors.
                stage_state = stage_state | {
                    "optimizer": optimizer_state | {"state": {}}
                }
            runner.load(stage_state)

    def _reads(self, step: int) -> Sequence[int]:
        return range(self.schedule.n_microbatches)

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        n_microbatches = self.schedule.n_microbatches
        self._released.release()
        self._fit_to(len(targets) // n_microbatches)
        for module in self._modules.values():
            module.begin(step)
        # Of the micro-batches, on the rank of the last stage.
        self._losses: list[LossValue] = []
        first_inputs: Values = ()
        if 0 in self._modules:
            first_inputs = inputs
        of_last_stage: dict[str, Any] = {}
        if self._has_last_stage:
            of_last_stage = {"target": targets, "losses": []}
        with self.world.watch.waiting(_MESSAGES, self._everyone):
            outputs = self._runner.step(*first_inputs, **of_last_stage)
        counts = [loss.count for loss in self._losses if loss.count is not None]
        total_count = self._total_count(counts)
        for runner in self._runners:
            total = GradientSum(runner.take_statistics())
            for name, master in runner.masters.items():
                if master.grad is not None:
                    total.add({name: master.grad})
            if total_count is not None:
                total.add({COUNT: total_count})
            runner.update(total, n_microbatches, keep_old=False)
        if self._has_last_stage:
            means = torch.stack([loss.mean() for loss in self._losses])
            microbatches = tuple(range(n_microbatches))
            all_counts = None
            if counts:
                all_counts = torch.stack(counts)
            return StepResult(
                step, microbatches, means, outputs.detach(), counts=all_counts
            )
        output = self.stages.output
        # The other ranks have computed no loss.
        no_samples = torch.empty(
            0, *output.shape[1:], dtype=output.dtype, device=self.world.device
        )
        return StepResult(step, (), no_samples.new_empty(0), no_samples)

    def _microbatch_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return where torch's backward of a micro-batch begins."""
        loss = self._loss(outputs, targets)
        self._losses.append(loss)
        n_microbatches = self.schedule.n_microbatches
        # Torch divides the gradients by n.
        return loss.root(n_microbatches, 1.0) * n_microbatches

    def _total_count(self, counts: Sequence[Tensor]) -> Tensor | None:
        """Return the sum of the last stage's counts, on every rank; None if there are none."""
        # Only the rank of the last stage knows whether the loss has counts, so a flag comes with
        # the sum.
        sum_and_flag = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        if counts:
            sum_and_flag = torch.stack(
                [torch.stack([*counts]).sum(), torch.ones_like(counts[0])]
            )
        total_count, has_counts = self.total(sum_and_flag)
        if not has_counts:
            return None
        return total_count

    def _fit_to(self, size: int) -> None:
        """Make torch's schedule for micro-batches of ``size`` samples, unless made before."""
        if size == self._size:
            return
        # torch's stages receive messages of one shape only.
        self._size = size
        boundaries = [*self.stages.boundaries, (self.stages.output,)]
        stages: Any = [
            PipelineStage(
                module,
                stage,
                len(self.stages),
                self.world.device,
                input_args=_meta_tensors(boundaries[stage], size, trained=stage > 0),
                output_args=_meta_tensors(boundaries[stage + 1], size, trained=True),
                group=self.world.group,
            )
            for stage, module in self._modules.items()
        ]
        make = _torch_schedule(self.schedule)
        # Schedules with one stage a rank take the stage, others a list.
        if issubclass(make, PipelineScheduleSingle):
            (stages,) = stages
        self._runner = make(stages, self.schedule.n_microbatches, self._microbatch_loss)


class _StageModule(nn.Module):
    """A stage, as torch's schedule calls it: the micro-batches in order, each once a step."""

    def __init__(
        self, runner: StageRunner, world: World, is_last: bool, splits_backward: bool
    ) -> None:
        super().__init__()
        self.world = world
        self.runner = runner
        self.is_last = is_last
        self.splits_backward = splits_backward
        self.compute = runner.compute  # torch finds the parameters there

    def begin(self, step: int) -> None:
        self.step = step
        self.next_microbatch = 0

    def forward(self, *inputs: Tensor) -> Tensor | Values:
        microbatch = self.next_microbatch
        self.next_microbatch += 1
        weights: dict[str, Tensor] = dict(self.runner.masters)
        # A position without peers: an error here is the model's, not the backend's.
        self.world.watch.at(f"{self.runner.index}F{microbatch}", self.step)
        outputs = self.runner.forward(weights, inputs, (microbatch,), self.step)
        self.world.watch.at(_MESSAGES, self.step, range(self.world.size))
        if self.splits_backward:
            outputs = tuple(_unshared(output, inputs) for output in outputs)
        if self.is_last:
            return outputs[0]
        return outputs


def _unshared(output: Tensor, inputs: Values) -> Tensor:
    """Return ``output``, or a copy if it shares memory: torch detaches it in place."""
    if output._is_view() or any(output is tensor for tensor in inputs):
        return output.clone()
    return output


def rank_orders(schedule: Schedule) -> list[list[Op]]:
    """Return the ops of one step on each rank, in order."""
    starts = schedule.timing.starts
    orders: list[list[Op]] = [[] for _ in range(schedule.n_ranks)]
    for op in sorted(starts, key=starts.__getitem__):
        orders[schedule.rank(op.stage, op.microbatch)].append(op)
    return orders


def _torch_schedule(schedule: Schedule) -> type:
    """Return torch's schedule with the same orders."""
    if schedule.max_staleness == 0 and schedule.state == "replicated":
        orders_of_schedule = rank_orders(schedule)
        for orders, torch_schedule in _torch_orders(
            schedule.n_stages, schedule.n_microbatches, schedule.n_ranks
        ):
            if orders_of_schedule == [list(ops) for ops in orders]:
                return torch_schedule
    raise UserError(
        "runtime=torch_pipelining runs what torch.distributed.pipelining has: schedule=gpipe;"
        " one_f_one_b with a micro-batch per stage or more; interleaved_1f1b with several stages a"
        " rank; zero_bubble with a multiple of the ranks as micro-batches"
        f" (got {describe_ranks(schedule)})"
    )


def _torch_orders(
    n_stages: int, n_microbatches: int, n_ranks: int
) -> Iterator[tuple[Sequence[Sequence[Op]], type]]:
    """Yield the orders of torch's schedules that exist for these sizes, and the schedules."""
    # Torch's interleaved schedules run rounds of n_ranks micro-batches, all of one length.
    has_equal_rounds = n_microbatches % max(1, n_microbatches // n_ranks) == 0
    if n_stages == n_ranks:
        yield pipeline_orders.gpipe(n_stages, n_microbatches), ScheduleGPipe
        if n_stages <= n_microbatches:
            yield pipeline_orders.one_f_one_b(n_stages, n_microbatches), Schedule1F1B
        if has_equal_rounds:
            orders = pipeline_orders.zero_bubble(n_stages, n_microbatches)
            yield orders, ScheduleInterleavedZeroBubble
    elif n_stages > n_ranks and n_stages % n_ranks == 0 and has_equal_rounds:
        orders = pipeline_orders.interleaved_1f1b(n_stages, n_microbatches, n_ranks)
        yield orders, ScheduleInterleaved1F1B


def _meta_tensors(
    boundary: tuple[Boundary, ...], size: int, *, trained: bool
) -> Values:
    """Return what crosses a boundary with micro-batches of ``size`` samples, without memory."""
    tensors = []
    for crossing in boundary:
        # What has no batch, such as a tied weight, crosses as one row.
        shape = (size if crossing.batched else 1, *crossing.shape[1:])
        tensor = torch.empty(shape, dtype=crossing.dtype, device="meta")
        tensors.append(
            tensor.requires_grad_(trained and crossing.dtype.is_floating_point)
        )
    return tuple(tensors)

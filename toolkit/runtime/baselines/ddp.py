"""torch's DistributedDataParallel, and the training step that FSDP shares with it."""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.random_draws import drawing
from toolkit.model.traced_stage import draws_at_random, in_training
from toolkit.runtime.baselines.baseline import Baseline, check_data_parallel
from toolkit.runtime.baselines.ddp_hooks import CompressionOptions, Compressor
from toolkit.runtime.losses import LossValue, nonzero
from toolkit.runtime.microbatches import StepResult
from toolkit.runtime.stage import Values, channels_last
from toolkit.runtime.step_options import StepOptions
from toolkit.runtime.updater import Updater
from toolkit.schedule import Schedule

# torch 2.11 has the older name of the argument, which later versions warn of.
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in _DDP_ARGUMENTS
)


class WholeModel(nn.Module):
    """All stages as one module in training mode, with the model's own tensors.

    Args:
        stages: the model, partitioned.
        seed: seed of the random draws, with step, layer and micro-batch.

    Attributes:
        at: step and micro-batch of the next forward.
    """

    def __init__(self, stages: Stages, seed: int) -> None:
        super().__init__()
        tensors = chain(stages.model.parameters(), stages.model.buffers())
        # In deepcopy's memo a tensor is its own copy, so that the stages share the model's.
        memo = {id(tensor): tensor for tensor in tensors}
        self.stages = nn.ModuleList(map(in_training, copy.deepcopy(list(stages), memo)))
        self.seed = seed
        self.at = (0, 0)
        self._draws_at_random = any(draws_at_random(stage) for stage in self.stages)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Map inputs ``[b, ...]`` to the model's output ``[b, ...]``."""
        draws: AbstractContextManager[object] = nullcontext()
        if self._draws_at_random:
            draws = drawing(inputs, self.seed, *self.at)
        values = inputs
        with draws:
            for stage in self.stages:
                values = stage(*values)
        return values[0]

    def statistics(self) -> list[Tensor]:
        """Return the running statistics of batch norms that advance."""
        statistics = []
        for norm in self.modules():
            if (
                isinstance(norm, _BatchNorm)
                and norm.training
                and norm.running_mean is not None
            ):
                statistics += [norm.running_mean, cast(Tensor, norm.running_var)]
        return statistics


def check_weights_stay(stages: Stages, runtime: str, way_out: str) -> None:
    """Raise UserError if a stage sends a weight on; for systems that free it after the forward."""
    for index, stage in enumerate(stages):
        for name in stage.meta["sends_weights"]:
            raise UserError(
                f"runtime={runtime} frees the weights of a stage after its forward, and stage"
                f" {index} sends {name} to a later stage, which uses it, too: {way_out},"
                " cut the model into one stage, or use runtime=distributed"
            )


@dataclass(eq=False, repr=False, kw_only=True)
class Synchronous(Baseline):
    """Rank m runs micro-batch m; the wrapper averages the gradients over the ranks.

    Batch norms normalise by the micro-batch. :meth:`module` averages the ranks' running
    statistics, which equals averaging them at each step.
    """

    states: ClassVar[tuple[str, ...]]

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError unless ``schedule`` is data parallelism of delay 0."""
        check_data_parallel(schedule, cls.runtime, "dp", 0, cls.states)

    def _check_options(self, schedule: Schedule) -> None:
        self.options.check_only(
            self.runtime, "precision", "loss_scale", "channels_last"
        )
        if self.options.precision == "fp16":
            raise UserError(
                f"runtime={self.runtime} takes no precision=fp16: use bf16, or runtime=distributed"
            )
        for name, module in self.stages.model.named_modules():
            if isinstance(module, nn.SyncBatchNorm):
                raise UserError(
                    f"got {name}, a SyncBatchNorm; each micro-batch is normalised by its own"
                    " statistics: use the plain BatchNorm"
                )

    def _build(self) -> Sequence[Updater]:
        self._chain = WholeModel(self.stages, self.seed)
        self._wrapped = self._wrap(self._chain)
        return [
            Updater(stage, self.optimizer, self.lr_scheduler)
            for stage in self._chain.stages
        ]

    @abstractmethod
    def _wrap(self, model: WholeModel) -> nn.Module:
        """Return the model as torch trains it on many ranks."""

    def _in_forward(self) -> AbstractContextManager[None]:
        """Context of a forward."""
        return nullcontext()

    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        # Rank m is micro-batch m: its number seeds the draws, as in every other runtime.
        self._chain.at = step, self.rank
        if self.options.channels_last:
            inputs = tuple(channels_last(tensor) for tensor in inputs)
        with self._in_forward(), self.options.autocast(self.world.device):
            outputs = self._wrapped(*inputs)
        loss = self._loss(outputs, targets)
        root = self._backward_root(loss)
        # The wrapper sums each bucket of gradients while the backward computes the next.
        with self.world.watch.waiting("the gradients of all ranks", self._everyone):
            self._backward(root)
        self._update()
        return self._result(step, outputs, loss)

    def _backward_root(self, loss: LossValue) -> Tensor:
        """Return where the backward begins: what is minimised is its mean over the ranks."""
        if loss.count is None:
            return loss.value
        # The wrapper averages: 1/N sum_m grad(N sum_m / total) = grad(sum over ranks) / total.
        total_count = nonzero(self.total(loss.count))
        return loss.value * (self.n_ranks / total_count).to(loss.value.dtype)

    def _backward(self, loss: Tensor) -> None:
        """Leave the gradients that are averaged over the ranks."""
        loss.backward()

    def _update(self) -> None:
        """Step every stage's optimizer."""
        for updater in self._updaters:
            updater.apply()

    @torch.no_grad()
    def _settle(self) -> None:
        """Average the ranks' running statistics."""
        # r <- (1 - a) r + a x is linear, so the mean of the ranks' statistics now is what averages
        # of x in each step would have given.
        statistics = self._chain.statistics()
        if statistics:
            means = self.total(torch.cat(statistics)) / self.n_ranks
            sizes = [len(tensor) for tensor in statistics]
            torch._foreach_copy_(statistics, means.split(sizes))


@dataclass(eq=False, repr=False, kw_only=True)
class DDP(Synchronous):
    """Data parallelism by torch's DistributedDataParallel.

    Args:
        stages, optimizer, loss, lr_scheduler, seed, world: as in ``Distributed``.
        schedule: ``catalog.data_parallel(n)``.
        options: only precision and memory format may be set.
        compression: of the gradients' messages: ``none``, ``fp16``, ``bf16``, ``int8``, ``int4``,
            ``topk`` or ``powersgd``; see :mod:`toolkit.runtime.baselines.ddp_hooks` for equations
            and sources.
        low_rank, warm_start: of ``powersgd``; see ``CompressionOptions``.
        compression_start, error_feedback: of ``powersgd`` and of codes.
        bucket_mb: size of the messages, in MB.
        bucket_view: whether gradients are views into the messages, which saves their memory.

    Raises:
        UserError: the schedule is not data parallelism, or an option has no such value.
    """

    runtime = "ddp"
    states = ("replicated",)

    compression: str = "none"
    low_rank: int = 2
    compression_start: int = 2
    warm_start: bool = True
    error_feedback: bool = True
    bucket_mb: float = 25.0
    bucket_view: bool = False

    def __post_init__(self) -> None:
        self._compression = CompressionOptions(
            self.compression,
            self.low_rank,
            self.compression_start,
            warm_start=self.warm_start,
            error_feedback=self.error_feedback,
        )
        if not self.bucket_mb > 0:
            raise UserError(
                f"bucket_mb is a size above 0: got {self.bucket_mb}; torch's is 25"
            )
        # torch's hook views each gradient as a matrix, which strides of channels_last do not allow.
        if self.compression == "powersgd" and self.options.channels_last:
            raise UserError(
                "compression=powersgd takes no channels_last=True: leave it out, or use int8"
            )
        super().__post_init__()

    def _wrap(self, model: WholeModel) -> nn.Module:
        wrapped = ddp_wrapped(
            model,
            self.world.group,
            self.options,
            bucket_mb=self.bucket_mb,
            bucket_view=self.bucket_view,
        )
        self._compressor = Compressor(wrapped, self._compression)
        return wrapped

    def _rank_state(self) -> dict[str, Any] | None:
        return self._compressor.state()

    def _load_rank_state(self, state: Mapping[str, Any] | None) -> None:
        self._compressor.load(state)


def ddp_wrapped(
    model: WholeModel,
    group: dist.ProcessGroup | None,
    options: StepOptions,
    *,
    bucket_mb: float,
    bucket_view: bool,
) -> DistributedDataParallel:
    """Return ``model`` as torch's DistributedDataParallel over the ranks of ``group``."""
    if options.channels_last:
        model.to(memory_format=torch.channels_last)
    return DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=bucket_view,
        # Or buffers would change in place between forward and backward.
        **cast(Any, {_SYNC_BUFFERS: False}),
    )

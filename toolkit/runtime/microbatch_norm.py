"""Batch normalisation per micro-batch, however many micro-batches run as one batch.

Each micro-batch is normalised by its own statistics, as on its own worker. Running statistics are
not read in training; they advance once a step, by the mean over the step's micro-batches, which
equals averaging the workers' buffers: ``take_statistics`` below or in the stage collects them, and
``toolkit.runtime.updater`` advances the buffers.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError
from toolkit.model.batch_norms import computes_otherwise
from toolkit.runtime.fused_norm import check_values, forward_formula, microbatch_norm

Columns = Sequence[Tensor | None]


@dataclass
class NormGroup:
    """What a stage is running. As a context: a forward that a checkpoint repeats.

    Attributes:
        size: number of micro-batches in one batch.
        again: whether the forward has run before, so that its statistics are known.
        least_fused: number of micro-batches from which their norms are one operation; None: never.
    """

    size: int = 1
    again: bool = False
    least_fused: int | None = None

    def __enter__(self) -> None:
        self.again = True

    def __exit__(self, *error: object) -> None:
        self.again = False


class MicrobatchNorm(nn.Module):
    """Replaces a batch norm in a stage; shares its weight and bias.

    ``statistics``: of the last forward, the sum over micro-batches of their means (row 0) and
    unbiased variances (row 1), ``[2, channels]``; None without running statistics.
    """

    def __init__(self, norm: _BatchNorm, group: NormGroup) -> None:
        super().__init__()
        self.weight = norm.weight
        self.bias = norm.bias
        self.eps = norm.eps
        # The type of the buffers; under autocast images have another.
        self.dtype = getattr(norm.running_mean, "dtype", None)
        self.group = group
        self.statistics: Tensor | None = None
        # The norm itself, if its class has its own forward. In a tuple, or it would be a module of
        # the stage.
        self.original: tuple[_BatchNorm, ...] = ()
        # Such as timm's, which normalise and then apply an activation.
        if computes_otherwise(norm):
            self.original = (copy.deepcopy(norm),)
            self.original[0].momentum = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``[size * b, channels, ...]``, each micro-batch by its own statistics."""
        least_fused = self.group.least_fused
        # A compiler fuses the formula, and would make long code of many batch norms.
        is_fused = least_fused is not None and (
            self.group.size >= least_fused or torch.compiler.is_compiling()
        )
        normalise = self._in_turn
        if is_fused and not self.original:
            normalise = self._at_once
        normalised, statistics = normalise(x)
        self.statistics = statistics
        return normalised

    def _in_turn(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run torch's own batch norm on one micro-batch after another."""
        n = self.group.size
        # Shared tensors are made, and their gradients summed, in one operation: on a GPU a small
        # operation takes longer to launch than to run.
        absent: Columns = [None] * n
        means = absent
        variances = absent
        statistics = None
        if self.dtype is not None:
            statistics = x.new_zeros(2, n, x.shape[1], dtype=self.dtype)
            means = statistics[0].unbind()
            variances = statistics[1].unbind()
        weights = self._for_each(self.weight)
        biases = self._for_each(self.bias)
        # The gradient of a chunk is copied into that of the whole, so no chunk of one part.
        chunks: Sequence[Tensor] = [x]
        if n > 1:
            chunks = x.chunk(n)
        normalised = []
        for chunk, mean, variance, weight, bias in zip(
            chunks, means, variances, weights, biases, strict=True
        ):
            normalised.append(self._normalised(chunk, mean, variance, weight, bias))
        y = normalised[0]
        if n > 1:
            y = torch.cat(normalised)
        if statistics is None:
            return y, None
        return y, statistics.sum(1)

    def _for_each(self, parameter: Tensor | None) -> Columns:
        """Return a parameter once for each micro-batch."""
        n = self.group.size
        if parameter is None or n == 1:
            return [parameter] * n
        return parameter.expand(n, -1).unbind()

    def _normalised(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """Normalise one micro-batch; write its statistics into ``mean`` and ``variance``."""
        if not self.original:
            # With momentum 1 the running statistics become those of this micro-batch.
            return F.batch_norm(x, mean, variance, weight, bias, True, 1.0, self.eps)
        tensors = {
            "running_mean": mean,
            "running_var": variance,
            "weight": weight,
            "bias": bias,
        }
        if self.dtype is not None:
            # A norm of its own may count its batches: let it count on a copy. The true counter
            # advances once a step, in :func:`advance_running_statistics`.
            tensors["num_batches_tracked"] = x.new_zeros((), dtype=torch.int64)
        present_tensors = {
            name: tensor for name, tensor in tensors.items() if tensor is not None
        }
        return cast(
            Tensor, torch.func.functional_call(self.original[0], present_tensors, (x,))
        )

    def _at_once(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute the formula: as one operation, or inside of a compiled stage."""
        n_microbatches = self.group.size
        check_values(x, n_microbatches)
        normalise = (
            forward_formula if torch.compiler.is_compiling() else microbatch_norm
        )
        # The other two results, mean and reciprocal deviation, are for the backward of the
        # operation.
        normalised, statistics, _, _ = normalise(
            x, self.weight, self.bias, n_microbatches, self.eps
        )
        if self.dtype is None:
            return normalised, None
        return normalised, statistics.detach().to(self.dtype)


def replace_norms(stage: nn.Module, group: NormGroup) -> dict[str, MicrobatchNorm]:
    """Replace each batch norm by a :class:`MicrobatchNorm`; return them by name."""
    replaced = {}
    # A list, since the loop replaces modules of the stage.
    for name, module in list(stage.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(f"{name}: got a SyncBatchNorm; expected a plain BatchNorm")
        # A batch norm in evaluation mode normalises by its running statistics, and stays.
        by_batch = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, _BatchNorm) and by_batch:
            replaced[name] = MicrobatchNorm(module, group)
            stage.set_submodule(name, replaced[name])
    return replaced


def take_statistics(norms: Mapping[str, MicrobatchNorm]) -> dict[str, Tensor]:
    """Take the statistics of the norms that have some, by the norm's name."""
    statistics = {}
    for name, norm in norms.items():
        if norm.statistics is not None:
            statistics[name] = norm.statistics
            # Taken once: the next forward makes its own, and these may be added to in place.
            norm.statistics = None
    return statistics


@torch.no_grad()
def advance_running_statistics(
    norms: Sequence[_BatchNorm], statistics: Sequence[Tensor]
) -> None:
    """Advance the buffers of ``norms``.

    ``statistics`` of each: mean over micro-batches of means and variances, ``[2, channels]``.
    """
    torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in norms], 1)
    # One operation for all norms of a momentum: a GPU would launch one for each buffer.
    pairs: defaultdict[float, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for norm, norm_statistics in zip(norms, statistics, strict=True):
        counter = cast(Tensor, norm.num_batches_tracked)
        momentum = norm.momentum
        if momentum is None:
            # torch's cumulative mean: update n moves by 1/n. To read the counter waits for the
            # device, as torch's own norm does.
            momentum = 1 / float(counter)
        running = (cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var))
        pairs[momentum] += zip(running, norm_statistics, strict=True)
    for momentum, of_momentum in pairs.items():
        buffers, newest = zip(*of_momentum, strict=True)
        torch._foreach_lerp_(buffers, newest, momentum)

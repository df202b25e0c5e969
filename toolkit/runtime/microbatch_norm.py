"""Batch normalisation per micro-batch, however many micro-batches run as one batch.

Each micro-batch is normalised by its own statistics, as on its own worker. Running statistics are
not read in training; they advance once a step, by the mean over the step's micro-batches, which
equals averaging the workers' buffers.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.errors import UserError
from toolkit.model.custom_norms import computes_otherwise


@dataclass
class Group:
    """What a stage is running.

    Attributes:
        size: how many micro-batches, as one batch.
        again: whether it is a forward that has been run before, whose statistics are known.
    """

    size: int = 1
    again: bool = False


class Again:
    """The context in which a forward runs that has been run before; it can be entered often."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __enter__(self) -> None:
        self.group.again = True

    def __exit__(self, *error: object) -> None:
        self.group.again = False


class MicrobatchNorm(nn.Module):
    """Takes the place of a batch norm in a stage; shares its weight and bias.

    ``statistics`` is the sum over micro-batches, since it was last taken, of their means (row 0)
    and unbiased variances (row 1); None where the batch norm keeps no running statistics.
    """

    def __init__(self, norm: _BatchNorm, group: Group) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.eps = norm.eps
        # Of the buffers, which under autocast is not that of the images.
        self.dtype = None if norm.running_mean is None else norm.running_mean.dtype
        self.group = group
        self.statistics: Tensor | None = None
        # Of a forward of its own, which ends in more than torch's does; no module of the stage.
        self.own = (_following(norm),) if computes_otherwise(norm) else ()

    def forward(self, x: Tensor) -> Tensor:
        fused = x.is_cuda and torch.compiler.is_compiling() and not self.own
        y, statistics = self._at_once(x) if fused else self._in_turn(x)
        if statistics is not None and not self.group.again:
            total = self.statistics
            self.statistics = statistics if total is None else total + statistics
        return y

    def _in_turn(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """By torch's own batch norm, one micro-batch after another.

        What they share is made, and its gradient summed, at once: on a GPU small operations cost
        more to begin than to do.
        """
        n = self.group.size
        tracks = self.dtype is not None
        statistics = x.new_zeros(2, n, x.shape[1], dtype=self.dtype) if tracks else None
        nones = [None] * n
        means, variances = (nones, nones) if statistics is None else statistics.unbind()
        weights, biases = (nones if p is None else _copies(p, n) for p in (self.weight, self.bias))
        # With momentum 1 the running statistics become those of this micro-batch.
        parts = [
            self._normalised(part, mean, variance, weight, bias)
            for part, mean, variance, weight, bias in zip(
                _parts(x, n), means, variances, weights, biases, strict=True
            )
        ]
        y = parts[0] if n == 1 else torch.cat(parts)
        return y, None if statistics is None else statistics.sum(1)

    def _normalised(
        self,
        x: Tensor,
        mean: Tensor | None,
        variance: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        """One micro-batch, whose statistics ``mean`` and ``variance`` become."""
        if not self.own:
            return F.batch_norm(x, mean, variance, weight, bias, True, 1.0, self.eps)
        given = {"running_mean": mean, "running_var": variance, "weight": weight, "bias": bias}
        if self.dtype is not None:
            given["num_batches_tracked"] = x.new_zeros((), dtype=torch.int64)
        known = {name: tensor for name, tensor in given.items() if tensor is not None}
        return cast(Tensor, torch.func.functional_call(self.own[0], known, (x,)))

    def _at_once(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """By the formula, for a GPU's compiler, to which as many batch norms would be long code.

        A CPU's takes half as long over it, too, but makes code half as fast.
        """
        parts = x.unflatten(0, (self.group.size, -1))
        wide = parts.to(torch.promote_types(x.dtype, torch.float32))
        dims = [1, *range(3, wide.dim())]
        n_values = prod(wide.shape[dim] for dim in dims)
        if n_values == 1:
            raise UserError("a batch norm takes more than one value of a channel: enlarge batch")
        variance, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
        y = (wide - mean) * torch.rsqrt(variance + self.eps)
        of_channels = [-1, *[1] * (wide.dim() - 3)]
        if self.weight is not None:
            y = y * self.weight.view(of_channels)
        if self.bias is not None:
            y = y + self.bias.view(of_channels)
        y = y.to(x.dtype).flatten(0, 1)
        if self.dtype is None:
            return y, None
        unbiased = variance * (n_values / (n_values - 1))
        statistics = torch.stack([t.detach().sum(0).flatten() for t in (mean, unbiased)])
        return y, statistics.to(self.dtype)

    def take_statistics(self) -> Tensor | None:
        statistics, self.statistics = self.statistics, None
        return statistics


def _following(norm: _BatchNorm) -> _BatchNorm:
    """A copy whose running statistics become those of each batch."""
    copied = copy.deepcopy(norm)
    copied.momentum = 1.0
    return copied


def _parts(x: Tensor, n: int) -> Sequence[Tensor]:
    return x.chunk(n) if n > 1 else [x]  # the gradient of a chunk is copied into that of the whole


def _copies(parameter: Tensor, n: int) -> Sequence[Tensor]:
    return parameter.expand(n, -1).unbind() if n > 1 else [parameter]


def replace_norms(stage: nn.Module, group: Group) -> dict[str, MicrobatchNorm]:
    """Put a :class:`MicrobatchNorm` in the place of each batch norm; return them by name.

    One in evaluation mode normalises by its running statistics, and stays.
    """
    replaced = {}
    for name, module in list(stage.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            raise UserError(
                f"{name} is a SyncBatchNorm, which mixes micro-batches that must run at the same"
                " moment: use the plain BatchNorm"
            )
        by_batch = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, _BatchNorm) and by_batch:
            replaced[name] = MicrobatchNorm(module, group)
            stage.set_submodule(name, replaced[name])
    return replaced


@torch.no_grad()
def advance_running_statistics(norms: Sequence[_BatchNorm], statistics: Sequence[Tensor]) -> None:
    """Advance the buffers of ``norms`` by their ``statistics`` (see MicrobatchNorm), means."""
    torch._foreach_add_([cast(Tensor, norm.num_batches_tracked) for norm in norms], 1)
    buffers: dict[float, list[Tensor]] = {}
    found: dict[float, list[Tensor]] = {}
    for norm, (mean, variance) in zip(norms, statistics, strict=True):
        kept = norm.running_mean, norm.running_var, norm.num_batches_tracked
        running_mean, running_var, counter = (cast(Tensor, tensor) for tensor in kept)
        momentum = 1 / float(counter) if norm.momentum is None else norm.momentum
        buffers.setdefault(momentum, []).extend((running_mean, running_var))
        found.setdefault(momentum, []).extend((mean, variance))
    for momentum, advanced in buffers.items():
        torch._foreach_lerp_(advanced, found[momentum], momentum)

"""Batch normalisation per micro-batch, however many micro-batches run as one batch.

Each micro-batch is normalised by its own statistics, as on its own worker. Running statistics are
not read in training; they advance once a step, by the mean over the step's micro-batches, which
equals averaging the workers' buffers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


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

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._normalise(x)
        return torch.cat([self._normalise(part) for part in x.chunk(self.group.size)])

    def _normalise(self, x: Tensor) -> Tensor:
        tracks = self.dtype is not None
        statistics = x.new_zeros(2, x.shape[1], dtype=self.dtype) if tracks else (None, None)
        # With momentum 1 the running statistics become those of this micro-batch.
        y = F.batch_norm(
            x, statistics[0], statistics[1], self.weight, self.bias, True, 1.0, self.eps
        )
        if isinstance(statistics, Tensor) and not self.group.again:
            # The backward keeps them, so they are never changed in place.
            total = self.statistics
            self.statistics = statistics.clone() if total is None else total.add_(statistics)
        return y

    def take_statistics(self) -> Tensor | None:
        statistics, self.statistics = self.statistics, None
        return statistics


def replace_norms(stage: nn.Module, group: Group) -> dict[str, MicrobatchNorm]:
    """Put a :class:`MicrobatchNorm` in the place of each batch norm; return them by name.

    One in evaluation mode normalises by its running statistics, and stays.
    """
    replaced = {}
    for name, module in list(stage.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"{name} is a SyncBatchNorm, which mixes micro-batches that must run at the same"
                " moment: use the plain BatchNorm"
            )
        by_batch = module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, _BatchNorm) and by_batch:
            replaced[name] = MicrobatchNorm(module, group)
            stage.set_submodule(name, replaced[name])
    return replaced


@torch.no_grad()
def advance_running_statistics(norm: _BatchNorm, statistics: Tensor) -> None:
    """Advance a batch norm's buffers by one step's mean ``statistics`` (see MicrobatchNorm)."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked += 1
    momentum = norm.momentum
    if momentum is None:
        momentum = 1 / float(norm.num_batches_tracked)
    norm.running_mean.lerp_(statistics[0], momentum)
    norm.running_var.lerp_(statistics[1], momentum)

"""Batch norms whose own forward, as timm's, may compute what torch's does."""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

_NORM_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
# Sizes of the dimensions after the channels
_SAMPLES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (2, 2), nn.BatchNorm3d: (2, 2, 2)}


def computes_otherwise(norm: _BatchNorm) -> bool:
    """Return whether a batch norm has its own forward."""
    return not type(norm).forward.__module__.startswith("torch.nn.modules")


def own_norms(model: nn.Module) -> set[nn.Module]:
    """Return the batch norms of ``model`` whose own forward, as timm's, can replace torch's."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return {norm for norm in norms if computes_otherwise(norm) and _normalises(norm)}


def _normalises(norm: _BatchNorm) -> bool:
    """Return whether a forward uses batch statistics as torch's does, by a run on the CPU.

    In training it must not read running statistics, must update them as torch does, and must have
    no other tensors.
    """
    trailing_sizes = [size for kind, size in _SAMPLES.items() if isinstance(norm, kind)]
    names = {name for name, _ in (*norm.named_parameters(), *norm.named_buffers())}
    if not trailing_sizes or names - _NORM_TENSORS:
        return False
    norm_copy = copy.deepcopy(norm).to_empty(device="cpu").float().train()
    # With momentum 1/2, running statistics become the mean of old and new ones.
    norm_copy.momentum = 0.5
    inputs = torch.randn(
        6,
        norm.num_features,
        *trailing_sizes[0],
        generator=torch.Generator().manual_seed(0),
    )
    other_dimensions = [0, *range(2, inputs.dim())]
    outputs = []
    with torch.random.fork_rng([]), torch.no_grad():
        for parameter in norm_copy.parameters():
            parameter.fill_(1.0)
        # Two runs, whose outputs are the same unless they read running statistics.
        for initial_value in (0.0, 8.0):
            for buffer in norm_copy.buffers():
                buffer.fill_(initial_value)
            torch.default_generator.manual_seed(0)  # CPU only
            try:
                outputs.append(norm_copy(inputs.clone()).clone())
            except Exception:  # user code may raise anything
                return False
            for name, batch_statistic in (
                ("running_mean", inputs.mean(other_dimensions)),
                ("running_var", inputs.var(other_dimensions)),
            ):
                running_statistic = getattr(norm_copy, name)
                if running_statistic is not None and not _near(
                    running_statistic, (initial_value + batch_statistic) / 2
                ):
                    return False
    return _near(*outputs)


def _near(actual: Tensor, expected: Tensor) -> bool:
    """Return whether means and variances, some close to 0, are equal up to rounding."""
    return torch.allclose(actual, expected, rtol=1e-4, atol=1e-5)

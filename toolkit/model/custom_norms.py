"""Recognise a user's own batch norm classes, such as timm's with a built-in activation."""

import copy
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
_SAMPLES = {
    nn.BatchNorm1d: (),
    nn.BatchNorm2d: (2, 2),
    nn.BatchNorm3d: (2, 2, 2),
}  # sizes of the dimensions after the channels


def computes_otherwise(norm: _BatchNorm) -> bool:
    """Whether a batch norm has its own forward."""
    return not type(norm).forward.__module__.startswith("torch.nn.modules")


def own_norms(model: nn.Module) -> set[nn.Module]:
    """Return the batch norms of ``model`` whose own forward can replace torch's."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    return {norm for norm in norms if computes_otherwise(norm) and _normalises(norm)}


def _normalises(norm: _BatchNorm) -> bool:
    """Whether a forward uses batch statistics as torch's does, by running it on the CPU.

    In training it must not read running statistics, must update them as torch does, and must have
    no other tensors. The random generator keeps its state.
    """
    sizes = [size for kind, size in _SAMPLES.items() if isinstance(norm, kind)]
    names = {name for name, _ in chain(norm.named_parameters(), norm.named_buffers())}
    if not sizes or names - _TENSORS:
        return False
    twin = copy.deepcopy(norm).to_empty(device="cpu").float().train()
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            for parameter in twin.parameters():
                parameter.fill_(1.0)
            x = torch.randn(6, norm.num_features, *sizes[0])
            one, other = (_tried(twin, x, known, momentum=0.0) for known in (0.0, 7.0))
            _tried(twin, x, 0.0, momentum=1.0)
    except Exception:  # user code may raise anything
        return False
    others = [0, *range(2, x.dim())]
    pairs = zip((twin.running_mean, twin.running_var), (x.mean(others), x.var(others)), strict=True)
    return torch.allclose(one, other) and all(
        found is None or torch.allclose(found, expected, atol=1e-6) for found, expected in pairs
    )


def _tried(norm: _BatchNorm, x: torch.Tensor, known: float, momentum: float) -> torch.Tensor:
    """Return the output with running statistics ``known`` and momentum ``momentum``."""
    torch.default_generator.manual_seed(0)  # CPU only
    norm.momentum = momentum
    for buffer in norm.buffers():
        buffer.fill_(known)
    return norm(x.clone()).clone()

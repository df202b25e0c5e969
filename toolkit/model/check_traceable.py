"""Hooks and batch norms that stages would silently run otherwise than the model does."""

import copy
from collections.abc import Collection, Iterator
from itertools import chain

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from toolkit.errors import UserError

_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *_BACKWARD_HOOKS)
_TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
# Sizes of the dimensions after the channels
_SAMPLES = {nn.BatchNorm1d: (), nn.BatchNorm2d: (2, 2), nn.BatchNorm3d: (2, 2, 2)}


def check_traceable(model: nn.Module, traced: fx.GraphModule, evaluated: Collection[str]) -> None:
    """Reject hooks that would not run and batch norms that would compute something else.

    Args:
        model: the user's model.
        traced: its graph.
        evaluated: names of modules that stay in evaluation mode.

    Raises:
        UserError: names the first difference.
    """
    for why in _differences(model, traced, evaluated):
        raise UserError(f"{type(model).__name__} {why}")


def _differences(
    model: nn.Module, traced: fx.GraphModule, evaluated: Collection[str]
) -> Iterator[str]:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            yield (
                f"has a hook on the gradient of {name}, which would not run on copies of the"
                " weights: remove it, and change gradients in the optimizer's step"
            )
    called = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    for name, module in model.named_modules():
        within = any(f"{name}.".startswith(f"{leaf}.") for leaf in called)
        lost = _HOOKS if module is model else () if within else _BACKWARD_HOOKS
        if any(getattr(module, hooks) for hooks in lost):
            yield (
                f"has a hook on {name or 'itself'}, which would not run since torch.fx traces"
                " through it: remove it, or put it on a layer of torch.nn"
            )
    norms: dict[nn.Module, str] = {}
    for name in called:
        module = traced.get_submodule(name)
        if not isinstance(module, _BatchNorm) or name in evaluated:
            continue
        hooked = any(getattr(module, hooks) for hooks in _HOOKS)
        if hooked or is_parametrized(module):
            what = "hook" if hooked else "parametrization"
            yield (
                f"has a {what} on the batch norm {name}, which would not run on each micro-batch:"
                " remove it"
            )
        if module in norms and module.track_running_stats:
            yield (
                f"calls the batch norm {norms[module]} more than once in a forward: use one batch"
                " norm per call"
            )
        norms[module] = name


def computes_otherwise(norm: _BatchNorm) -> bool:
    """Whether a batch norm has its own forward."""
    return not type(norm).forward.__module__.startswith("torch.nn.modules")


def own_norms(model: nn.Module) -> set[nn.Module]:
    """Return the batch norms of ``model`` whose own forward, as timm's, can replace torch's."""
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

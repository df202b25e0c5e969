"""Reject models whose stages would silently train differently."""

from collections.abc import Iterator

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from toolkit.errors import UserError
from toolkit.model.trace import evaluated

_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", *_BACKWARD_HOOKS)


def check_traceable(model: nn.Module, traced: fx.GraphModule) -> None:
    """Reject hooks that would not run and batch norms that would compute something else.

    Args:
        model: the user's model.
        traced: its graph.

    Raises:
        UserError: names the first difference.
    """
    for why in _differences(model, traced):
        raise UserError(f"{type(model).__name__} {why}")


def _differences(model: nn.Module, traced: fx.GraphModule) -> Iterator[str]:
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
        if not isinstance(module, _BatchNorm) or name in evaluated(traced):
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS):
            yield (
                f"has a hook on the batch norm {name}, which would not run on each micro-batch:"
                " remove it, or put it on another layer"
            )
        if is_parametrized(module):
            yield (
                f"has a parametrization on the batch norm {name}, which would not run on each"
                " micro-batch: remove it"
            )
        if module in norms and module.track_running_stats:
            yield (
                f"calls the batch norm {norms[module]} more than once in a forward: use one batch"
                " norm per call"
            )
        norms[module] = name

"""Reject what a traced graph would not do: hooks, and calls of batch norms."""

from collections.abc import Sequence

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from toolkit.errors import UserError
from toolkit.model.traced_stage import evaluated

_BACKWARD_HOOKS = ("_backward_pre_hooks", "_backward_hooks")
HOOKS = ("_forward_pre_hooks", "_forward_hooks", *_BACKWARD_HOOKS)
"""Where a module keeps its hooks."""


def check_traceable(model: nn.Module, traced: fx.GraphModule) -> None:
    """Reject hooks that would not run, and batch norms that would compute something else.

    Raises:
        UserError: names the first difference between ``model`` and its graph ``traced``.
    """
    called_modules = []
    for node in traced.graph.nodes:
        if node.op == "call_module":
            called_modules.append(str(node.target))
    _check_hooks_of_parameters(model)
    _check_hooks_of_modules(model, called_modules)
    _check_norms(model, traced, called_modules)


def _check_hooks_of_parameters(model: nn.Module) -> None:
    """Reject hooks on gradients of parameters."""
    for name, parameter in model.named_parameters():
        # Stages compute with detached leaves of the weights, which share memory but no hooks.
        accumulate_hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or accumulate_hooks:
            raise UserError(
                f"{type(model).__name__} has a hook on the gradient of {name}, which would not run"
                " on copies of the weights: remove it, and change gradients in the optimizer's step"
            )


def _check_hooks_of_modules(model: nn.Module, called_modules: Sequence[str]) -> None:
    """Reject hooks on modules that the graph does not call."""
    for name, module in model.named_modules():
        is_in_called_module = any(
            f"{name}.".startswith(f"{leaf}.") for leaf in called_modules
        )
        # A graph calls leaves as they are, with all hooks. It traces through other modules, forward
        # hooks included, but not through the call of the model itself.
        lost_hooks: tuple[str, ...] = _BACKWARD_HOOKS
        if module is model:
            lost_hooks = HOOKS
        elif is_in_called_module:
            lost_hooks = ()
        if any(getattr(module, hooks) for hooks in lost_hooks):
            raise UserError(
                f"{type(model).__name__} has a hook on {name or 'itself'}, which would not run"
                " since torch.fx traces through it: remove it, or put it on a layer of torch.nn"
            )


def _check_norms(
    model: nn.Module, traced: fx.GraphModule, called_modules: Sequence[str]
) -> None:
    """Reject batch norms that cannot be replaced by a norm of each micro-batch."""
    evaluated_names = evaluated(traced)
    name_of_norm: dict[nn.Module, str] = {}
    for name in called_modules:
        module = traced.get_submodule(name)
        if not isinstance(module, _BatchNorm) or name in evaluated_names:
            continue
        # Stages replace the norm by one that shares its tensors, and neither hooks nor
        # parametrizations.
        if is_parametrized(module) or any(getattr(module, hooks) for hooks in HOOKS):
            raise UserError(
                f"{type(model).__name__} has a hook or a parametrization on the batch norm {name},"
                " which would not run on each micro-batch: remove it"
            )
        # That one keeps the statistics of its last call: those of the call before would be lost.
        if module in name_of_norm and module.track_running_stats:
            raise UserError(
                f"{type(model).__name__} calls the batch norm {name_of_norm[module]} more than once"
                " in a forward: use one batch norm per call"
            )
        name_of_norm[module] = name

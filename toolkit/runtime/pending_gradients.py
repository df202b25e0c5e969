"""Gradients that are not there yet, for ``torch.nn.utils.clip_grad_norm_`` all the same.

Under a delayed rule the sum of a gradient is complete only on the rank that updates the stage, and
after this rank has gone on. What can be had is the largest norm that the script asks for: each
stage is then clipped by it at its update.
"""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from toolkit.errors import UserError
from toolkit.runtime.step_optimizer import Clip

# What clip_grad_norm_ calls, in short, with nan in place of each value:
#
#     norm = vector_norm(grads)          keeps norm_type
#     factor = max_norm / (norm + 1e-6)  __rtruediv__: keeps max_norm
#     factor.clamp(max=1.0)
#     grads.mul_(factor)                 notes Clip(max_norm, norm_type); changes nothing
_DIVIDED_INTO_A_NUMBER = ("__rtruediv__", "__rdiv__")
_PRODUCTS = ("mul_", "_foreach_mul_")
_CHECKS = ("isnan", "isinf", "isfinite", "logical_or", "logical_not")


def pending_parameter(
    parameter: nn.Parameter, note: Callable[[Clip], None]
) -> nn.Parameter:
    """Return what stands for a parameter whose gradient is not known yet.

    It is not the parameter itself, which an update may be changing, and takes no memory.

    Args:
        parameter: the parameter.
        note: function that is called with what clips the gradient.
    """
    # Weights of other ranks' stages are empty. One element keeps their norm nan; of none it is 0.
    shape = parameter.shape if parameter.numel() else (1,)
    empty = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    twin = nn.Parameter(empty.expand(shape), requires_grad=parameter.requires_grad)
    if twin.requires_grad:
        twin.grad = PendingGradient.like(twin, note)
    return twin


class PendingGradient(Tensor):
    """The gradient of a parameter before it is known, or what is computed from it: nan.

    A norm divided into a number is the factor of a clipping, whose largest norm is that number. A
    product with the factor notes it.
    """

    note: Callable[[Clip], None]
    norm_type: float = 2.0
    max_norm: float | None = None
    checks: bool = False  # whether it says if a value is finite

    @classmethod
    def like(
        cls, parameter: nn.Parameter, note: Callable[[Clip], None]
    ) -> "PendingGradient":
        """Return the pending gradient of ``parameter``, which takes no memory."""
        unknown = torch.full((), nan, dtype=parameter.dtype, device=parameter.device)
        pending = unknown.expand(parameter.shape).as_subclass(cls)
        pending.note = note
        return pending

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``func``; note a clipping, and refuse what needs the values."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        first = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls))
        factors = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, cls)]
        if name in _PRODUCTS and factors and factors[0].max_norm is not None:
            first.note(Clip(factors[0].max_norm, factors[0].norm_type))
            return args[0]
        if name == "__bool__" and first.checks:
            return False  # whether the norm is finite is not known yet
        in_place = name.endswith("_") and not name.startswith("__")
        if in_place or name == "__bool__":
            raise UserError(
                f"gradients: got {name}; expected clip_grad_norm_ only, since gradients are summed"
                " after this rank has gone on. Change them in the optimizer, or use rule='dp'"
            )
        if name == "__format__":
            return format(nan, args[1])
        # Or the call would come back here.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)

        def pending(value: Tensor) -> Tensor:
            output = value.as_subclass(cls)
            output.note = first.note
            output.norm_type = first.norm_type
            output.max_norm = first.max_norm
            output.checks = name in _CHECKS
            if name.endswith("norm") and len(args) > 1:
                output.norm_type = float(args[1])
            if name in _DIVIDED_INTO_A_NUMBER:
                output.max_norm = float(args[1])
            return output

        return tree_map_only(Tensor, pending, result)

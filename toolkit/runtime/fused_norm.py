"""Batch norms of many micro-batches as one operation.

``n`` micro-batches of ``b`` samples lie one after another in ``x``, ``[n * b, channels, ...]``::

    x_hat = (x - mean[m, c]) / sqrt(variance[m, c] + eps)      m: micro-batch, c: channel
    y     = weight[c] * x_hat + bias[c]

and with ``k`` values a channel and micro-batch, ``g`` the gradient of ``y``::

    dx    = weight / sqrt(variance + eps) * (g - sum(g) / k - x_hat * sum(g * x_hat) / k)

Both formulas are operations of their own. On a GPU torch compiles each to a few kernels, in any
memory format; torch's own batch norm would take one launch a micro-batch and direction.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError

Outputs = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def can_compile(device: torch.device) -> bool:
    """Whether torch can compile the formulas for ``device``: a GPU, and Triton is installed."""
    return device.type == "cuda" and find_spec("triton") is not None


def forward_formula(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n_microbatches: int,
    eps: float,
) -> Outputs:
    """Normalise each micro-batch by its own statistics.

    Args:
        x: ``[n_microbatches * b, channels, ...]``.
        weight: ``[channels]``, or None.
        bias: ``[channels]``, or None.
        n_microbatches: number of micro-batches in ``x``.
        eps: added to the variance.

    Returns:
        ``y``, like ``x``; the sums over micro-batches of means and unbiased variances,
        ``[2, channels]``; mean and reciprocal deviation, ``[n, 1, channels, 1...]``.
    """
    microbatches = _in_full_precision(x, n_microbatches)
    # [n, b, channels, ...]: all but micro-batch and channel are averaged over.
    dims = _reduced(microbatches)
    n_values = microbatches.numel() // (microbatches.shape[0] * microbatches.shape[2])
    variance, mean = torch.var_mean(microbatches, dims, correction=0, keepdim=True)
    reciprocal = torch.rsqrt(variance + eps)
    y = (microbatches - mean) * reciprocal
    if weight is not None:
        y = y * _by_channel(weight, y)
    if bias is not None:
        y = y + _by_channel(bias, y)
    # As torch's batch norm: normalised by the biased variance, while running statistics follow the
    # unbiased one.
    unbiased = variance * (n_values / (n_values - 1))
    statistics = torch.stack([mean.sum(0).flatten(), unbiased.sum(0).flatten()])
    return y.to(x.dtype).flatten(0, 1), statistics, mean, reciprocal


def backward_formula(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    reciprocal: Tensor,
) -> Gradients:
    """Return the gradients of ``x``, weight and bias from that of ``y``.

    Args:
        gradient: that of ``y``, like ``x``.
        x: ``[n_microbatches * b, channels, ...]``.
        weight: ``[channels]``, or None.
        mean: of each micro-batch and channel, ``[n, 1, channels, 1...]``.
        reciprocal: of the deviation, likewise.
    """
    n_microbatches = mean.shape[0]
    microbatches = _in_full_precision(x, n_microbatches)
    gradients = _in_full_precision(gradient, n_microbatches)
    dims = _reduced(microbatches)
    n_values = microbatches.numel() // (microbatches.shape[0] * microbatches.shape[2])
    normalised = (microbatches - mean) * reciprocal
    # The two sums of dx, per micro-batch; over all micro-batches they are the gradients of bias and
    # weight, so they are computed once.
    gradient_sum = gradients.sum(dims, keepdim=True)
    product_sum = (gradients * normalised).sum(dims, keepdim=True)
    factor = reciprocal
    if weight is not None:
        factor = reciprocal * _by_channel(weight, reciprocal)
    inner = gradients - gradient_sum / n_values - normalised * (product_sum / n_values)
    x_gradient = (inner * factor).to(x.dtype).flatten(0, 1)
    weight_gradient = product_sum.sum(0).flatten()
    bias_gradient = gradient_sum.sum(0).flatten()
    return x_gradient, weight_gradient, bias_gradient


def check_values(x: Tensor, n_microbatches: int) -> None:
    """Raise UserError if a channel of a micro-batch has a single value, whose variance is 0."""
    if x.numel() == n_microbatches * x.shape[1]:
        raise UserError(
            "batch norm: got one value of a channel; expected more. Enlarge batch"
        )


def _in_full_precision(x: Tensor, n_microbatches: int) -> Tensor:
    """Return ``x`` as ``[n_microbatches, b, channels, ...]``, in 32 bits or more."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.unflatten(0, (n_microbatches, -1)).to(wide)


def _reduced(microbatches: Tensor) -> list[int]:
    """Return the dimensions of ``[n, b, channels, ...]`` over which statistics are taken."""
    return [1, *range(3, microbatches.dim())]


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return ``[channels]`` in a shape that broadcasts over ``[n, b, channels, ...]``."""
    return values.view([-1, *[1] * (like.dim() - 3)])


@cache
def _compiled(formula: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``formula`` compiled for each shape; a model has about ten of them a group size."""
    compiled: Callable[..., Any] = torch.compile(formula, fullgraph=True, dynamic=False)
    # Beyond a limit torch would raise an error; it counts both a function's and a code object's.
    limits = {"recompile_limit": 1024, "accumulated_recompile_limit": 1024}
    return torch._dynamo.config.patch(limits)(compiled)


def _chosen(formula: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    if not can_compile(device):
        return formula
    return _compiled(formula)


@torch.library.custom_op("toolkit::microbatch_norm", mutates_args=())
def microbatch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n_microbatches: int,
    eps: float,
) -> Outputs:
    """Apply :func:`forward_formula` as one operation."""
    run = _chosen(forward_formula, x.device)
    y, statistics, mean, reciprocal = run(x, weight, bias, n_microbatches, eps)
    # An activation may overwrite y, which autograd refuses if y is a view.
    y = torch.ops.aten._unsafe_view(y, x.shape)
    return y, statistics, mean, reciprocal


@torch.library.custom_op("toolkit::microbatch_norm_backward", mutates_args=())
def microbatch_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, reciprocal: Tensor
) -> Gradients:
    """Apply :func:`backward_formula` as one operation."""
    run = _chosen(backward_formula, x.device)
    gradients: Gradients = run(gradient, x, weight, mean, reciprocal)
    return gradients


@microbatch_norm.register_fake
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    n_microbatches: int,
    eps: float,
) -> Outputs:
    # Shapes and types alone, for runs without memory, such as torch.compile's.
    wide = torch.promote_types(x.dtype, torch.float32)
    statistics = x.new_empty(2, x.shape[1], dtype=wide)
    shape = n_microbatches, 1, x.shape[1], *[1] * (x.dim() - 2)
    return (
        torch.empty_like(x),
        statistics,
        x.new_empty(shape, dtype=wide),
        x.new_empty(shape, dtype=wide),
    )


@microbatch_norm_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, reciprocal: Tensor
) -> Gradients:
    weight_gradient = mean.new_empty(x.shape[1])
    return torch.empty_like(x), weight_gradient, torch.empty_like(weight_gradient)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    x, weight, bias, _, _ = inputs
    _, statistics, mean, reciprocal = output
    ctx.save_for_backward(x, weight, mean, reciprocal)
    ctx.types = [
        None if parameter is None else parameter.dtype for parameter in (weight, bias)
    ]
    ctx.mark_non_differentiable(statistics, mean, reciprocal)
    # An output that is not used has no gradient then, in place of a tensor of zeros.
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, gradient: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    if gradient is None:  # y is not used
        return None, None, None, None, None
    x, weight, mean, reciprocal = ctx.saved_tensors
    x_gradient, *parameter_gradients = microbatch_norm_backward(
        gradient, x, weight, mean, reciprocal
    )
    # Of weight and bias, which may be absent; the formula computes in 32 bits or more.
    converted = []
    for parameter_gradient, dtype in zip(parameter_gradients, ctx.types, strict=True):
        converted.append(None if dtype is None else parameter_gradient.to(dtype))
    return x_gradient, *converted, None, None


microbatch_norm.register_autograd(_differentiate, setup_context=_save)

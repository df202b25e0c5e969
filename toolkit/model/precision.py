"""Precisions by name, and meta tensors that compute as on the training device.

torch has no autocast for meta tensors, and decomposes their attention into matrix products, which
would save one number per pair of tokens; no fused kernel does that. The operations below that
compute in 16 bits or in their widest argument type are torch's (its page on automatic mixed
precision); all others that the installed torch registers with autocast compute in 32 bits.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from toolkit.errors import check_choice

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", "tf32", *_AUTOCAST)
HALVES = (torch.float16, torch.bfloat16)

_PRODUCTS = {
    "addbmm",
    "addmm",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_tbc",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "linalg_vecdot",
    "linear",
    "matmul",
    "mm",
    "prelu",
    "scaled_dot_product_attention",
}
_PRODUCTS_ON_GPU = {
    "addmv",
    "addr",
    "chain_matmul",
    "einsum",
    "gru_cell",
    "linalg_multi_dot",
    "lstm_cell",
    "mv",
    "rnn_relu_cell",
    "rnn_tanh_cell",
}
# Torch decomposes them into _cudnn_rnn.
_WITHIN_CUDNN = {"gru", "lstm", "rnn_relu", "rnn_tanh"}
_WIDEST_ON_GPU = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "grid_sampler",
    "index_put",
    "scatter_add",
    "tensordot",
    "vdot",
}
_WIDEST_ON_CPU = {"cat", "index_copy", "stack"}

_PLAIN_ATTENTION = F.scaled_dot_product_attention
_ATEN = torch.ops.aten
_ON_CPU = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_FLASH = _ATEN._scaled_dot_product_flash_attention.default
_EFFICIENT = _ATEN._scaled_dot_product_efficient_attention.default
_DROPOUT = {_ON_CPU: 3, _FLASH: 3, _EFFICIENT: 5}  # index of the argument


def check_precision(precision: str) -> None:
    """Raise UserError if ``precision`` is not one of :data:`PRECISIONS`."""
    check_choice("precision", precision, PRECISIONS)


def autocast_type(precision: str) -> torch.dtype | None:
    """Return the type in which autocast computes; None without autocast."""
    return _AUTOCAST.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which models compute."""
    dtype = autocast_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


@contextmanager
def as_trained(device: torch.device, precision: str) -> Iterator[None]:
    """Apply the autocast and the fused attention of ``device`` (meta: a GPU) to meta tensors."""
    # Let the mode see the operations inside torch's Python functions.
    names = (
        "has_torch_function",
        "has_torch_function_unary",
        "has_torch_function_variadic",
    )
    no_overrides: dict[str, Any] = dict.fromkeys(names, lambda *values: False)
    with (
        patch.multiple(F, **no_overrides),
        _OnDevice(device.type == "cpu", autocast_type(precision)),
    ):
        yield


class _OnDevice(TorchFunctionMode):
    def __init__(self, on_cpu: bool, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.on_cpu = on_cpu
        self.casts: dict[str, Callable[[Any], Any]] = {}
        if dtype is not None:
            if on_cpu:
                operations = registered("CPU")
                widest_operations = _WIDEST_ON_CPU
                product_operations = _PRODUCTS
            else:
                operations = registered("CUDA")
                widest_operations = _WIDEST_ON_GPU
                product_operations = _PRODUCTS | _PRODUCTS_ON_GPU | _WITHIN_CUDNN
            # Autocast's policies: 32 bits, the widest type of the arguments, or 16 bits. The later
            # of these counts, if an operation is in several.
            self.casts = dict.fromkeys(operations, partial(_to, torch.float32))
            self.casts |= dict.fromkeys(widest_operations, _widened)
            self.casts |= dict.fromkeys(product_operations, partial(_to, dtype))

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        cast = self.casts.get(_operation(func))
        if cast is not None:
            args, kwargs = cast((args, kwargs))
        if func in (_PLAIN_ATTENTION, _ATEN.scaled_dot_product_attention.default):
            return _attention(self.on_cpu, *args, **kwargs)
        return func(*args, **kwargs)


@cache
def registered(device: str) -> frozenset[str]:
    """Return the operations that autocast knows on ``device`` (``CPU``, ``CUDA``)."""
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key(
        f"Autocast{device}"
    )
    return frozenset(
        name.partition("::")[2].partition(".")[0] for name in registrations
    )


def _operation(function: Any) -> str:
    """Return the dispatcher's name of a function: ``x @ y`` is ``matmul``."""
    name: str = getattr(function, "__name__", "").partition(".")[0]
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return name[1:] if name in ("rmatmul", "rpow") else name
    return name


def _to(dtype: torch.dtype, values: Any) -> Any:
    """Cast the tensors of a tree that autocast casts."""
    return tree_map(lambda value: value.to(dtype) if _is_cast(value) else value, values)


def _widened(values: Any) -> Any:
    """Cast the tensors of a tree to their widest type."""
    dtypes = {value.dtype for value in tree_leaves(values) if _is_cast(value)}
    return (
        _to(max(dtypes, key=lambda dtype: dtype.itemsize), values) if dtypes else values
    )


def _is_cast(value: Any) -> bool:
    """Return whether autocast casts ``value``: a floating-point tensor of at most 32 bits."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def attention_draws(kernel: Any, arguments: tuple[Any, ...]) -> bool | None:
    """Return whether a fused attention uses dropout; None for other kernels."""
    if kernel not in _DROPOUT:
        return None
    position = _DROPOUT[kernel]  # trailing defaults are omitted
    return len(arguments) > position and bool(arguments[position] > 0)


# Calls pass on the arguments of F.scaled_dot_product_attention, by place or by name.
def _attention(
    on_cpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **scale_and_groups: Any,
) -> Any:
    """Attend by the fused kernel that the training device would take, or as torch decomposes it."""
    tensors = (query, key, value)
    scale: float | None = scale_and_groups.get("scale")
    # Where torch has no fused kernel for these arguments, attention is made of matrix products.
    takes_apart = query.dtype == torch.float64
    if on_cpu:
        takes_apart = dropout_p > 0 or (
            attn_mask is not None and attn_mask.requires_grad
        )
    has_groups = scale_and_groups.get("enable_gqa", False)
    if query.dim() != 4 or has_groups or takes_apart:
        return _PLAIN_ATTENTION(
            *tensors, attn_mask, dropout_p, is_causal, **scale_and_groups
        )
    mask = attn_mask
    if mask is not None:
        # Kernels take numbers that are added to the scores, of the full shape.
        if mask.dtype == torch.bool:
            mask = torch.empty_like(mask, dtype=query.dtype)
        mask = mask.expand(*query.shape[:3], key.shape[2])
    if on_cpu:
        return _ON_CPU(*tensors, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]
    if mask is None and query.dtype in HALVES:
        return _FLASH(*tensors, dropout_p, is_causal, scale=scale)[0]
    # Flash attention takes 16 bits and no mask; this one takes the rest. True: it keeps what its
    # backward needs.
    return _EFFICIENT(*tensors, mask, True, dropout_p, is_causal, scale=scale)[0]

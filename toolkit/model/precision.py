"""Precisions by name; autocast of real tensors by torch, and of meta tensors here.

torch has no autocast for meta tensors. The operations below that compute in 16 bits or in their
widest argument type are torch's (its page on automatic mixed precision); all other operations that
the installed torch registers with autocast compute in 32 bits.
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

_CONVOLUTIONS = {
    *(f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3)),
    *("_convolution", "conv_tbc"),
}
_PRODUCTS = {
    *("addbmm", "addmm", "baddbmm", "bmm", "linalg_vecdot", "linear", "matmul", "mm", "prelu"),
    "scaled_dot_product_attention",
}
_PRODUCTS_ON_GPU = {
    *("addmv", "addr", "chain_matmul", "convolution", "einsum", "linalg_multi_dot", "mv"),
    *("gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    *("_cudnn_rnn", "_scaled_dot_product_flash_attention"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
    *("cudnn_convolution", "cudnn_convolution_transpose"),
}
_WITHIN_CUDNN = {"gru", "lstm", "rnn_relu", "rnn_tanh"}  # torch decomposes them into _cudnn_rnn
_PRODUCTS_ON_CPU = {"_addmm_activation", "_native_multi_head_attention", "mkldnn_rnn_layer"}
_WIDEST_ON_GPU = {
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "grid_sampler", "index_put"),
    *("scatter_add", "tensordot", "vdot"),
}
_WIDEST_ON_CPU = {"cat", "index_copy", "stack"}

_Cast = Callable[[Any], Any]


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


def meta_autocast(dtype: torch.dtype | None, *, on_cpu: bool) -> AbstractContextManager[object]:
    """Return a context in which operations on meta tensors cast to a 16-bit type, as autocast."""
    return nullcontext() if dtype is None else _within_functions(_Autocast(dtype, on_cpu))


def casting(function: Callable[..., Any], dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return ``function`` with its arguments cast to ``dtype``, if given."""
    return function if dtype is None else partial(_called, function, partial(_to, dtype))


class _Autocast(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype, on_cpu: bool) -> None:
        super().__init__()
        self.casts: dict[str, _Cast] = dict.fromkeys(
            registered("CPU" if on_cpu else "CUDA"), partial(_to, torch.float32)
        )
        widest = _WIDEST_ON_CPU if on_cpu else _WIDEST_ON_GPU
        self.casts |= dict.fromkeys(widest, _widened)
        own = _PRODUCTS_ON_CPU if on_cpu else _PRODUCTS_ON_GPU | _WITHIN_CUDNN
        self.casts |= dict.fromkeys(_CONVOLUTIONS | _PRODUCTS | own, partial(_to, dtype))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        cast = self.casts.get(_operation(func))
        if cast is None:
            return func(*args, **(kwargs or {}))
        return _called(func, cast, *args, **(kwargs or {}))


@cache
def registered(device: str) -> frozenset[str]:
    """Return the operations that autocast knows on ``device`` (``CPU``, ``CUDA``)."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device}")
    return frozenset(name.partition("::")[2].partition(".")[0] for name in found)


def _operation(function: Any) -> str:
    """Return the dispatcher's name of a function: ``x @ y`` is ``matmul``."""
    name: str = getattr(function, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        return name[1:] if name in ("rmatmul", "rpow") else name
    return name


def _called(function: Callable[..., Any], cast: _Cast, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs))
    return function(*args, **kwargs)


def _to(dtype: torch.dtype, values: Any) -> Any:
    return tree_map(lambda x: x.to(dtype) if _is_cast(x) else x, values)


def _widened(values: Any) -> Any:
    found = {x.dtype for x in tree_leaves(values) if _is_cast(x)}
    return _to(max(found, key=lambda dtype: dtype.itemsize), values) if found else values


def _is_cast(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


@contextmanager
def _within_functions(mode: TorchFunctionMode) -> Iterator[None]:
    """Let ``mode`` see the operations inside torch's Python functions."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    unseen: dict[str, Any] = dict.fromkeys(names, lambda *values: False)
    with patch.multiple(F, **unseen), mode:
        yield

"""Attention of meta tensors as one fused kernel, as on the training device.

The meta device decomposes attention into matrix products, and so would save one number per pair of
tokens, which no fused kernel does.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

PLAIN = F.scaled_dot_product_attention
_ATEN = torch.ops.aten
_ON_CPU = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_FLASH = _ATEN._scaled_dot_product_flash_attention.default
_EFFICIENT = _ATEN._scaled_dot_product_efficient_attention.default
_DROPOUT = {_ON_CPU: 3, _FLASH: 3, _EFFICIENT: 5}  # index of the argument
HALVES = (torch.float16, torch.bfloat16)


def fused(device: torch.device) -> Callable[..., Tensor]:
    """Return ``scaled_dot_product_attention`` of meta tensors as on ``device`` (CPU, else GPU)."""
    return partial(_attention, device.type == "cpu")


def within_modules(attention: Callable[..., Tensor]) -> AbstractContextManager[object]:
    """Return a context in which torch's own modules call ``attention``."""
    return patch.object(F, "scaled_dot_product_attention", attention)


def draws(kernel: Any, arguments: tuple[Any, ...]) -> bool | None:
    """Whether a fused attention uses dropout; None for other kernels."""
    if kernel not in _DROPOUT:
        return None
    place = _DROPOUT[kernel]  # trailing defaults are omitted
    return len(arguments) > place and bool(arguments[place] > 0)


def _attention(
    on_cpu: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    found: Tensor
    tensors = (query, key, value)
    takes_apart = dropout_p > 0 if on_cpu else query.dtype == torch.float64
    if query.dim() != 4 or enable_gqa or takes_apart:
        return PLAIN(*tensors, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    mask = attn_mask
    if mask is not None:
        mask = torch.empty_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
        mask = mask.expand(*query.shape[:3], key.shape[2])
    if on_cpu:
        found, *_ = _ON_CPU(*tensors, dropout_p, is_causal, attn_mask=mask, scale=scale)
    elif mask is None and query.dtype in HALVES:
        found, *_ = _FLASH(*tensors, dropout_p, is_causal, scale=scale)
    else:
        found, *_ = _EFFICIENT(*tensors, mask, True, dropout_p, is_causal, scale=scale)
    return found

"""Precisions by name, and what they compute in 16 bits."""

from contextlib import AbstractContextManager, nullcontext

import torch

from toolkit.schedule.given import check_choice

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = ("fp32", "tf32", *_AUTOCAST)


def check_precision(precision: str) -> None:
    """Refuse what is none of :data:`PRECISIONS`.

    Raises:
        ValueError: it is none.
    """
    check_choice("precision", precision, PRECISIONS)


def autocast_type(precision: str) -> torch.dtype | None:
    """The type that autocast computes in; None where everything is as the weights are."""
    return _AUTOCAST.get(precision)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which models compute."""
    dtype = autocast_type(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)

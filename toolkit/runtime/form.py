"""Whether a state, of tensors and plain values, is formed as another."""

from typing import Any

from torch import Tensor


def difference(found: Any, expected: Any, where: str) -> str | None:
    """Where ``found`` is formed otherwise than ``expected``; None if nowhere.

    Mappings have the same keys, sequences the same length, tensors the same shape and type of
    numbers, other values the same type; a whole number may stand for a float.

    Args:
        where: what ``found`` is called.
    """
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor) or _kind(found) != _kind(expected):
            return f"{where} is {_kind(found)}, not {_kind(expected)}"
        return None
    if isinstance(expected, dict):
        if not isinstance(found, dict):
            return f"{where} is {_kind(found)}, not a mapping"
        if lacking := [key for key in expected if key not in found]:
            return f"{where} lacks {lacking[0]}"
        if more := [key for key in found if key not in expected]:
            return f"{where} has {more[0]}, which is unknown"
        parts = ((found[key], expected[key], f"{where}.{key}") for key in expected)
    elif isinstance(expected, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(expected):
            return f"{where} is not of {len(expected)} values"
        pairs = zip(found, expected, strict=True)
        parts = ((*pair, f"{where}[{k}]") for k, pair in enumerate(pairs))
    else:
        same = type(found) is type(expected) or (type(found), type(expected)) == (int, float)
        return None if same else f"{where} is {_kind(found)}, not {_kind(expected)}"
    return next(filter(None, (difference(*part) for part in parts)), None)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "None" if value is None else f"of type {type(value).__name__}"

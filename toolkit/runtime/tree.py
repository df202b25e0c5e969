"""Nested mappings and sequences of tensors and plain values."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree`` with what ``change`` makes of its tensors in their place."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [map_tensors(change, value) for value in tree]
    return tree

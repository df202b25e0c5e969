"""Nested mappings and sequences of tensors and plain values."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

Path = tuple[Any, ...]
"""The keys and indices that lead to a place in a tree."""


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """``tree`` with what ``change`` makes of its tensors in their place."""
    return map_places(lambda path, tensor: change(tensor), tree)


def map_places(change: Callable[[Path, Tensor], Any], tree: Any, path: Path = ()) -> Any:
    """``tree`` with what ``change`` makes of its tensors, and of where they are."""
    if isinstance(tree, Tensor):
        return change(path, tree)
    if isinstance(tree, dict):
        return {key: map_places(change, value, (*path, key)) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_places(change, value, (*path, k)) for k, value in enumerate(tree))
    return tree


def merged(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> dict[Any, Any]:
    """The places of both; where both have a value, that of ``second``."""
    found = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if both else value
    return found

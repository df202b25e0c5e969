"""Arguments and results that are not one tensor: tuples, keywords, dictionaries."""

import keyword
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from toolkit.errors import UserError

Inputs = tuple[Tensor, ...]


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists and dictionaries, and names made of their keys.

    Those of a dictionary come in the order of its sorted keys. Constants are left out.

    Raises:
        UserError: a value is of another kind.
    """
    prefix = f"{name}_" if name else ""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        # Sorted, so that two dictionaries with the same keys in another order are the same inputs.
        for key in sorted(value, key=str):
            yield from named_tensors(value[key], f"{prefix}{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from named_tensors(item, f"{prefix}{index}")
    elif not isinstance(value, bool | int | float | str | torch.dtype | None):
        place = f" for {name}" if name else ""
        raise UserError(
            f"inputs: got a {type(value).__name__}{place}; expected"
            " tensors [b, ...], or tuples, lists or dictionaries of them"
        )


def input_names(names: Iterable[str]) -> list[str]:
    """Make the names of :func:`named_tensors` arguments of a Python function, all different.

    A name that is valid already stays: ``0`` becomes ``input_0``, ``a b`` becomes ``a_b``, and the
    one tensor without a name is ``x``.
    """
    arguments: list[str] = []
    used_names = {"self"}
    for name in names:
        argument = re.sub(r"\W", "_", name) or "x"
        # Such as "0", of a tuple, or "class".
        if not argument.isidentifier() or keyword.iskeyword(argument):
            argument = f"input_{argument}"
        unique_name = argument
        repeats = 0
        while unique_name in used_names:
            repeats += 1
            unique_name = f"{argument}_{repeats}"
        used_names.add(unique_name)
        arguments.append(unique_name)
    return arguments


def tensors_of(value: Any) -> Inputs:
    """Return the tensors of nested tuples, lists and dictionaries, as :func:`named_tensors`."""
    return tuple(tensor for _, tensor in named_tensors(value))


def filled(value: Any, tensors: Iterator[Any]) -> Any:
    """Return ``value`` with other ``tensors``, in the order of :func:`named_tensors`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, Mapping):
        item_of_key = {
            key: filled(value[key], tensors) for key in sorted(value, key=str)
        }
        # Back in the dictionary's own order, which the user's code may rely on.
        return {key: item_of_key[key] for key in value}
    if isinstance(value, tuple | list):
        items = [filled(item, tensors) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that an example stands for.

    A tuple holds positional arguments, a dictionary keyword arguments; all else is one argument.
    """
    if isinstance(example, Mapping):
        return (), {str(key): example[key] for key in sorted(example, key=str)}
    if isinstance(example, tuple):
        return example, {}
    return (example,), {}


@dataclass(frozen=True)
class Results:
    """How a model's result is made of tensors.

    Attributes:
        spec: structure by torch's pytree, which knows the outputs of Hugging Face's models too.
        leaves: constants of the structure; Tensor in place of each tensor.
        scalars: which of the tensors are scalars, which stages return as ``[1]``.
    """

    spec: TreeSpec
    leaves: tuple[Any, ...]
    scalars: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, value: Any, is_tensor: Callable[[Any], bool], owner: str
    ) -> tuple["Results", list]:
        """Return the structure of ``value`` and its tensors; UserError if it has other contents.

        Args:
            value: what a model or a stage returns.
            is_tensor: whether a leaf of it counts as a tensor.
            owner: what returns it, for errors.
        """
        leaves, spec = tree_flatten(value)
        tensors = [leaf for leaf in leaves if is_tensor(leaf)]
        constants = tuple(Tensor if is_tensor(leaf) else leaf for leaf in leaves)
        for leaf in constants:
            if leaf is not Tensor and not isinstance(
                leaf, bool | int | float | str | None
            ):
                raise UserError(
                    f"{owner} returns a {type(leaf).__name__}; expected tensors, or tuples and"
                    " dictionaries of them. Leave it out, such as a cache by use_cache=False"
                )
        if not tensors:
            raise UserError(
                f"{owner} returns no tensor: return its predictions, [b, ...]"
            )
        return cls(spec, constants), tensors

    @property
    def is_single_tensor(self) -> bool:
        """Whether the model returns one tensor, with a row or more for each sample."""
        return (
            self.spec.num_nodes == 1 and self.leaves == (Tensor,) and not self.scalars
        )

    def restore(self, tensors: Inputs) -> Any:
        """Return the result that consists of ``tensors``, those of one micro-batch."""
        remaining_tensors = enumerate(tensors)
        leaves = []
        for leaf in self.leaves:
            if leaf is Tensor:
                index, leaf = next(remaining_tensors)
                if index in self.scalars:
                    # A stage returns one row for the micro-batch; the model returns a number.
                    leaf = leaf.squeeze(0)
            leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

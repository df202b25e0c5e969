"""Find attributes that a forward writes: its graph would not write them.

A cache that the first forward fills, and each later one leaves as it is, needs no graph.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

_OF_MODULES = frozenset(vars(nn.Module()))  # that torch itself keeps in each module
_SYMBOLS = (fx.Proxy, torch.SymInt, torch.SymFloat, torch.SymBool)
_MISSING = object()


class Attributes:
    """The attributes of all modules of a model at one time, to compare and to restore."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(path, module) for path, module in model.named_modules()]
        self._vars = [dict(vars(module)) for _, module in self._modules]
        self._buffers = [dict(module._buffers) for _, module in self._modules]
        self._contents = [_contents_of(module) for _, module in self._modules]

    def writes(self) -> dict[str, Any]:
        """Return the attributes that have changed, by their module's path and their name."""
        written = {}
        for (path, module), earlier_contents in zip(
            self._modules, self._contents, strict=True
        ):
            current_contents = _contents_of(module)
            # Of both times, since attributes may be new or gone.
            for name in earlier_contents | current_contents:
                value = current_contents.get(name, _MISSING)
                if not _same(earlier_contents.get(name, _MISSING), value, _identical):
                    written[f"{path}.{name}".lstrip(".")] = value
        return written

    def write(self, written: Mapping[str, Any]) -> None:
        """Set attributes to what :meth:`writes` has returned."""
        modules = dict(self._modules)
        for dotted_name, value in written.items():
            path, _, name = dotted_name.rpartition(".")
            if value is _MISSING:
                modules[path].__dict__.pop(name, None)
            else:
                modules[path].__dict__[name] = _copied(value)

    def restore(self) -> None:
        """Set attributes, the contents of their lists and dictionaries, and buffers as before."""
        for index, (_, module) in enumerate(self._modules):
            vars(module).clear()
            vars(module).update(self._vars[index])
            module._buffers.clear()
            module._buffers.update(self._buffers[index])
            for name, contents in self._contents[index].items():
                value = vars(module)[name]
                # A list of the model, which others may refer to, stays the same list.
                if not _same(contents, _copied(value), _identical):
                    _refill(value, contents)


def depends_on_inputs(value: Any) -> bool:
    """Return whether a written attribute is, or contains, a traced value."""
    if isinstance(value, Tensor):
        # Of torch.export: it has no values.
        return type(value) not in (Tensor, nn.Parameter)
    if isinstance(value, dict):
        return any(depends_on_inputs(item) for item in value.values())
    if isinstance(value, list | tuple | set):
        return any(depends_on_inputs(item) for item in value)
    return isinstance(value, _SYMBOLS)


def equal(first: Any, second: Any) -> bool:
    """Return whether two values of an attribute are equal; tensors by their elements."""
    return _same(first, second, _equal_tensors)


def _contents_of(module: nn.Module) -> dict[str, Any]:
    """Return a copy of a module's own attributes, without those that torch keeps."""
    return {
        name: _copied(value)
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


def _copied(value: Any) -> Any:
    """Copy lists, dictionaries and sets, and those inside them; keep other values."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, set):
        return set(value)
    # Not their subclasses: a named tuple is not made of one iterable.
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _refill(value: Any, contents: Any) -> None:
    """Give a list, dictionary or set the ``contents`` that it had."""
    if isinstance(value, dict | set):
        value.clear()
        value.update(contents)
    elif type(value) is list:
        value[:] = contents


def _same(first: Any, second: Any, same_tensors: Callable[[Any, Any], bool]) -> bool:
    """Return whether two attributes are equal; ``same_tensors`` compares tensors."""
    if first is second:
        return True
    # To compare a traced value would add an operation to the graph.
    if isinstance(first, _SYMBOLS) or isinstance(second, _SYMBOLS):
        return False
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return same_tensors(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same(first[key], second[key], same_tensors) for key in first
        )
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(
            _same(first_item, second_item, same_tensors)
            for first_item, second_item in zip(first, second, strict=True)
        )
    try:
        return bool(first == second)
    except Exception:  # objects of the user may raise anything
        return False


def _identical(first: Any, second: Any) -> bool:
    return first is second


def _equal_tensors(first: Any, second: Any) -> bool:
    are_tensors = isinstance(first, Tensor) and isinstance(second, Tensor)
    return are_tensors and first.dtype == second.dtype and torch.equal(first, second)

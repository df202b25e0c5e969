"""The user's own model, whose weights are whole and the newest whenever the script reads them.

While stages train, the model's parameters may be empty or one update old. Scripts read them
nevertheless by the model's own name: ``net.state_dict()``, ``copy.deepcopy(net)``,
``net.parameters()``. So the model gets a subclass of its class, which asks first.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class ScriptCalls:
    """Distinguishes the training script's calls from a runtime's calls of the same model.

    The thread that constructs it is that of the script. Threads of the executor and of other
    ranks' questions use the model as well, and so does the wrapper itself, :meth:`inside`.
    """

    def __init__(self) -> None:
        self._script_thread = threading.get_ident()
        self._n_inside = 0  # calls of the wrapper that the script is in

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Context of the wrapper's own use of the model."""
        self._n_inside += 1
        try:
            yield
        finally:
            self._n_inside -= 1

    @property
    def is_script(self) -> bool:
        """Whether the training script itself calls."""
        return not self._n_inside and threading.get_ident() == self._script_thread


class Owner(Protocol):
    """What trains a watched model."""

    def before_reading(self) -> None:
        """Bring the newest weights to the model, if the script calls and not a runtime."""

    def before_calling(self) -> None:
        """Bring the newest weights to the model before the script calls its forward."""

    def parameters_by_name(
        self, read: Callable[[], Iterator[tuple[str, nn.Parameter]]]
    ) -> Any:
        """Return ``read()``, the model's named parameters, as the script may have them now."""

    def load_weights(self, load: Callable[[], Any]) -> Any:
        """Call ``load``, which changes the model's weights, and train from these."""


# Not an attribute of the model: its state, copies and pickles stay those of the model's own class.
_owners: WeakKeyDictionary[nn.Module, Owner] = WeakKeyDictionary()
# One subclass for each class, so that two models of one class still have the same class.
_classes: dict[type[nn.Module], type[nn.Module]] = {}


def watch(model: nn.Module, owner: Owner) -> None:
    """Let ``owner`` know when a script reads ``model``."""
    _owners[model] = owner
    kind = type(model)
    if kind not in _classes.values():
        if kind not in _classes:
            _classes[kind] = _watched(kind)
        # The object stays the one that the script and its optimizer refer to.
        model.__class__ = _classes[kind]


def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of ``kind`` that looks like it."""

    class Watched(kind):  # type: ignore[valid-type, misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            owner = _owners.get(self)
            if owner is not None:
                owner.before_calling()
            return super().__call__(*args, **kwargs)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            owner = _owners.get(self)
            if owner is not None:
                owner.before_reading()
            return super().state_dict(*args, **kwargs)

        def load_state_dict(
            self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
        ) -> Any:
            def load() -> Any:
                # ``kind`` in place of super(), which a nested function cannot call without
                # arguments.
                return kind.load_state_dict(self, state_dict, *args, **kwargs)

            owner = _owners.get(self)
            return load() if owner is None else owner.load_weights(load)

        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            def read() -> Iterator[tuple[str, nn.Parameter]]:
                return kind.named_parameters(self, *args, **kwargs)

            owner = _owners.get(self)
            return read() if owner is None else owner.parameters_by_name(read)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Copy and pickle as an instance of the model's own class."""
            owner = _owners.get(self)
            if owner is not None:
                owner.before_reading()
            self.__class__ = kind  # type: ignore[assignment]
            try:
                make, arguments, *further_values = self.__reduce_ex__(protocol)
            finally:
                self.__class__ = Watched
            if make.__name__ == "__newobj__":
                # Pickle demands that an instance of Watched is made by it.
                make = object.__new__
            return make, arguments, *further_values

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(Watched, name, getattr(kind, name))
    return Watched

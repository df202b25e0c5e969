"""A research toolkit for cyclic data parallelism.

Subpackages load on first use, so that ``import toolkit`` costs next to nothing::

    from toolkit.schedule import catalog
    print(catalog.cyclic(4).grid())
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"

_SUBPACKAGES = (
    "cli",
    "cost",
    "figures",
    "model",
    "notebook",
    "plan",
    "results",
    "runtime",
    "schedule",
    "training",
)


def __getattr__(name: str) -> ModuleType:
    if name in _SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_SUBPACKAGES])

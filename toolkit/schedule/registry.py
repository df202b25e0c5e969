"""The registry of methods, which the catalogue fills."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from toolkit.schedule.schedule import Schedule


@dataclass(frozen=True)
class Method:
    """A named point of the catalogue; calling it with sizes and options builds its schedule."""

    name: str  # in conf/schedule and on the command line
    label: str  # in tables
    factory: Callable[..., Schedule]
    # Tables and suites select by it.
    kind: Literal["data_parallel", "cyclic", "pipeline"]
    source: str = ""
    # That make the factory this method.
    options: Mapping[str, Any] = field(default_factory=dict)
    stages_per_rank: int = 1

    def __call__(self, *sizes: int, **options: Any) -> Schedule:
        """Build the schedule."""
        return self.factory(*sizes, **{**self.options, **options})


METHODS: dict[str, Method] = {}
"""Methods by name."""

FACTORIES: dict[str, Callable[..., Schedule]] = {}
"""Functions of the catalogue that build schedules, by name."""


def register(*methods: Method) -> Mapping[str, Method]:
    """Add methods and their functions to the registry; return all methods."""
    for method in methods:
        METHODS[method.name] = method
        # Methods share functions (CDP-v1 and CDP-v2 are both `cyclic`), so this has fewer entries.
        FACTORIES[method.factory.__name__] = method.factory
    return METHODS

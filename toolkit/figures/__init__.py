"""Figures; they take schedules, timelines and result tables."""

from typing import TYPE_CHECKING, Any

from toolkit.figures.accuracy import accuracy, loss
from toolkit.figures.activity import activity
from toolkit.figures.links import link_times
from toolkit.figures.memory import memory_curves
from toolkit.figures.pipelines import pipelines
from toolkit.figures.schedule import schedules
from toolkit.figures.style import save, style
from toolkit.figures.timeline import timelines

if TYPE_CHECKING:
    from toolkit.figures.explorer import Explorer

__all__ = [
    "Explorer",
    "accuracy",
    "activity",
    "link_times",
    "loss",
    "memory_curves",
    "pipelines",
    "save",
    "schedules",
    "style",
    "timelines",
]


def __getattr__(name: str) -> Any:
    """The explorer loads widgets when it is first used."""
    if name == "Explorer":
        from toolkit.figures.explorer import Explorer

        return Explorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

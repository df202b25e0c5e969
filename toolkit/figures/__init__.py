"""Figures; they take schedules, timelines and result tables."""

from typing import TYPE_CHECKING, Any

from toolkit.figures.curves_figure import accuracy, loss, memory_curves
from toolkit.figures.links_figure import link_times
from toolkit.figures.pipelines_figure import pipelines
from toolkit.figures.plan_figure import plan_figure
from toolkit.figures.rates_figure import tuned_rates
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import save, style
from toolkit.figures.switching_figure import switching
from toolkit.figures.timeline_figure import timelines

if TYPE_CHECKING:
    from toolkit.figures.explorer import Explorer

__all__ = [
    "Explorer",
    "accuracy",
    "link_times",
    "loss",
    "memory_curves",
    "pipelines",
    "plan_figure",
    "save",
    "schedules",
    "style",
    "switching",
    "timelines",
    "tuned_rates",
]


def __getattr__(name: str) -> Any:
    """Import the explorer, and with it the widgets, on first use."""
    # Figures of trainings need no ipywidgets.
    if name == "Explorer":
        from toolkit.figures.explorer import Explorer

        return Explorer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Schedules to explore in a notebook, or as a static page."""

from toolkit.figures.explorer.choice import Choice
from toolkit.figures.explorer.widget import Explorer

__all__ = ["Choice", "Explorer"]

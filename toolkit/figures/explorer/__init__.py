"""Schedules to explore in a notebook, or as a static page."""

from toolkit.figures.explorer.widget import Explorer
from toolkit.schedule import ScheduleSpec

__all__ = ["Explorer", "ScheduleSpec"]

"""Figures; they take schedules, timelines and result tables."""

from toolkit.figures.accuracy import accuracy
from toolkit.figures.links import link_times
from toolkit.figures.memory import memory_curves
from toolkit.figures.schedule import schedules
from toolkit.figures.style import save, style
from toolkit.figures.timeline import timelines

__all__ = ["accuracy", "link_times", "memory_curves", "save", "schedules", "style", "timelines"]

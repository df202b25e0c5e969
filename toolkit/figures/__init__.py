"""Figures; they take schedules, programs and result tables."""

from toolkit.figures.accuracy import accuracy
from toolkit.figures.schedule import schedules
from toolkit.figures.style import save, style

__all__ = ["accuracy", "save", "schedules", "style"]

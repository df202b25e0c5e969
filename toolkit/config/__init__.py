"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.config.build import build_model, build_schedule, image_shape
from toolkit.config.cli import STOPPED, Ended, entry_point
from toolkit.config.ranks import leads

__all__ = [
    "STOPPED",
    "Ended",
    "build_model",
    "build_schedule",
    "entry_point",
    "image_shape",
    "leads",
]

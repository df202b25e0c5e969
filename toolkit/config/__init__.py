"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.config.build import (
    analysed_form,
    build_hardware,
    build_model,
    build_schedule,
    model_name,
)
from toolkit.config.cli import entry_point
from toolkit.config.ranks import leads
from toolkit.config.run import STOPPED, Ended

__all__ = [
    "STOPPED",
    "Ended",
    "analysed_form",
    "build_hardware",
    "build_model",
    "build_schedule",
    "entry_point",
    "leads",
    "model_name",
]

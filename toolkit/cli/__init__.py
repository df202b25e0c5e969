"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.cli.build import (
    analysed_form,
    build_hardware,
    build_model,
    build_schedule,
    model_name,
)
from toolkit.cli.command import STOPPED, Ended, entry_point
from toolkit.cli.process import is_rank_zero

__all__ = [
    "STOPPED",
    "Ended",
    "analysed_form",
    "build_hardware",
    "build_model",
    "build_schedule",
    "entry_point",
    "is_rank_zero",
    "model_name",
]

"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.cli.build import build_run, settle_delays
from toolkit.cli.build_groups import (
    analysed_form,
    build_hardware,
    build_model,
    build_schedule,
    build_schedules,
    load_samples,
    model_name,
)
from toolkit.cli.command import Ended, chosen, entry_point, output_folder, settings
from toolkit.options import STOPPED
from toolkit.torchrun import is_rank_zero

__all__ = [
    "STOPPED",
    "Ended",
    "analysed_form",
    "build_hardware",
    "build_model",
    "build_run",
    "build_schedule",
    "build_schedules",
    "chosen",
    "entry_point",
    "is_rank_zero",
    "load_samples",
    "model_name",
    "output_folder",
    "settings",
    "settle_delays",
]

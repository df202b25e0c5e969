"""Configuration: typed options, their values in conf/, and the command line."""

from toolkit.cli.command import Ended, chosen, entry_point, output_folder, settings
from toolkit.cli.instantiate import build_hardware, load_samples
from toolkit.cli.models import analysed_form, build_model, described_samples, model_name
from toolkit.cli.runs import build_run, settle_delays
from toolkit.cli.schedules import build_schedule, build_schedules
from toolkit.options import EXIT_STOPPED
from toolkit.torchrun import is_rank_zero

__all__ = [
    "EXIT_STOPPED",
    "Ended",
    "analysed_form",
    "build_hardware",
    "build_model",
    "build_run",
    "build_schedule",
    "build_schedules",
    "chosen",
    "described_samples",
    "entry_point",
    "is_rank_zero",
    "load_samples",
    "model_name",
    "output_folder",
    "settings",
    "settle_delays",
]

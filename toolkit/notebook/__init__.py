"""What notebooks need beside the toolkit: settings from anywhere, live progress, tables."""

from toolkit.notebook.live import Live, watched
from toolkit.notebook.runs import by_epoch, delay_study, differences, own_curves, train_rules
from toolkit.notebook.settings import RESULTS, settings
from toolkit.notebook.tables import by_rank, counted_and_measured, memory_saved
from toolkit.notebook.work import beside_prediction, train_on_ranks

__all__ = [
    "RESULTS",
    "Live",
    "beside_prediction",
    "by_epoch",
    "by_rank",
    "counted_and_measured",
    "delay_study",
    "differences",
    "memory_saved",
    "own_curves",
    "settings",
    "train_on_ranks",
    "train_rules",
    "watched",
]

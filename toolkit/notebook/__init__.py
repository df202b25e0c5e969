"""Helpers of the notebooks: settings from any folder, live progress, tables."""

from toolkit.cli import settings
from toolkit.files import ROOT
from toolkit.notebook.cost_tables import (
    by_rank,
    counted_and_measured,
    memory_saved,
    when_cdp_helps,
)
from toolkit.notebook.live import Live, beside_prediction, train_on_ranks, watched
from toolkit.notebook.run_tables import (
    by_epoch,
    delay_study,
    differences,
    in_words,
    own_curves,
    train_rules,
)

RESULTS = ROOT / "experiments" / "results"
"""Folder of the results that are kept with the code."""

__all__ = [
    "RESULTS",
    "Live",
    "beside_prediction",
    "by_epoch",
    "by_rank",
    "counted_and_measured",
    "delay_study",
    "differences",
    "in_words",
    "memory_saved",
    "own_curves",
    "settings",
    "train_on_ranks",
    "train_rules",
    "watched",
    "when_cdp_helps",
]

"""Results, where they come from, and how sure they are."""

from toolkit.tracking.collect import collect, learning_curves
from toolkit.tracking.delays import delay_means
from toolkit.tracking.ledger import Ledger
from toolkit.tracking.progress import Progress
from toolkit.tracking.provenance import describe, describe_cpu, provenance
from toolkit.tracking.result import write_result
from toolkit.tracking.session import track
from toolkit.tracking.statistics import (
    Estimate,
    binomial_half_width,
    over_seeds,
    paired_by_seed,
    paired_difference,
    spread,
)
from toolkit.tracking.tracked import Curves, track_measured, track_schedule
from toolkit.tracking.tracker import Tracker

__all__ = [
    "Curves",
    "Estimate",
    "Ledger",
    "Progress",
    "Tracker",
    "binomial_half_width",
    "collect",
    "delay_means",
    "describe",
    "describe_cpu",
    "learning_curves",
    "over_seeds",
    "paired_by_seed",
    "paired_difference",
    "provenance",
    "spread",
    "track",
    "track_measured",
    "track_schedule",
    "write_result",
]

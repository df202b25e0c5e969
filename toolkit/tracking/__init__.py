"""Results, where they come from, all runs as a table, and runs in W&B."""

from toolkit.tracking.collect import collect, learning_curves
from toolkit.tracking.delays import delay_means
from toolkit.tracking.ledger import Ledger
from toolkit.tracking.progress import Progress
from toolkit.tracking.provenance import describe, describe_cpu, provenance
from toolkit.tracking.result import write_result
from toolkit.tracking.session import track
from toolkit.tracking.tracked import Curves, track_measured, track_schedule
from toolkit.tracking.tracker import Tracker

__all__ = [
    "Curves",
    "Ledger",
    "Progress",
    "Tracker",
    "collect",
    "delay_means",
    "describe",
    "describe_cpu",
    "learning_curves",
    "provenance",
    "track",
    "track_measured",
    "track_schedule",
    "write_result",
]

"""Results of runs: records with their origin, tables, statistics, W&B and reports."""

from toolkit.results.collect import collect, learning_curves
from toolkit.results.progress import Progress
from toolkit.results.provenance import describe, describe_cpu, provenance
from toolkit.results.record import Ledger, write_result
from toolkit.results.statistics import (
    Equivalence,
    Estimate,
    binomial_half_width,
    delay_means,
    equivalence,
    over_seeds,
    paired_difference,
)
from toolkit.results.tracker import Tracker
from toolkit.results.wandb_measured import track_measured
from toolkit.results.wandb_run import RunLabels, track, track_schedule

__all__ = [
    "Equivalence",
    "Estimate",
    "Ledger",
    "Progress",
    "RunLabels",
    "Tracker",
    "binomial_half_width",
    "collect",
    "delay_means",
    "describe",
    "describe_cpu",
    "equivalence",
    "learning_curves",
    "over_seeds",
    "paired_difference",
    "provenance",
    "track",
    "track_measured",
    "track_schedule",
    "write_result",
]

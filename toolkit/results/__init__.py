"""Results of runs: records with their origin, tables, statistics, W&B and reports."""

from toolkit.results.collect import collect, learning_curves
from toolkit.results.progress import Progress
from toolkit.results.provenance import describe, describe_cpu, provenance
from toolkit.results.record import write_result
from toolkit.results.statistics import (
    Estimate,
    binomial_half_width,
    delay_means,
    over_seeds,
    paired_by_seed,
    paired_difference,
    spread,
)
from toolkit.results.training_log import Curves, Ledger, track_measured, track_schedule
from toolkit.results.wandb_run import Tracker, track

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

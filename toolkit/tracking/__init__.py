"""Results, where they come from, and how sure they are."""

from toolkit.tracking.delays import delay_means
from toolkit.tracking.progress import Progress
from toolkit.tracking.provenance import describe, describe_cpu, provenance
from toolkit.tracking.results import table, write_csv, write_json
from toolkit.tracking.statistics import Estimate, paired_difference, spread

__all__ = [
    "Estimate",
    "Progress",
    "delay_means",
    "describe",
    "describe_cpu",
    "paired_difference",
    "provenance",
    "spread",
    "table",
    "write_csv",
    "write_json",
]

"""Rules trained side by side, with the same seeds, and how sure their differences are."""

from toolkit.comparison.statistics import (
    Estimate,
    binomial_half_width,
    over_seeds,
    paired_by_seed,
    paired_difference,
    spread,
)

__all__ = [
    "Estimate",
    "binomial_half_width",
    "over_seeds",
    "paired_by_seed",
    "paired_difference",
    "spread",
]

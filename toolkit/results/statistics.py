"""Means, spreads and paired differences over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import mean, stdev
from typing import Any

from toolkit.errors import UserError
from toolkit.metric import Metric

_DELAY_MEASURES = ["delay", "cosine", "gradient", "fresh_gradient", "moved", "weights"]


@dataclass(frozen=True)
class Estimate:
    """A mean and half the width of its 95 % interval.

    The half width is NaN for values without a spread: a single one, or equal ones, which small
    counts often are.
    """

    mean: float
    half_width: float

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends of the 95 % interval."""
        return self.mean - self.half_width, self.mean + self.half_width


def paired_difference(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """Return the mean of value - baseline over pairs, with Student's 95 % interval.

    Args:
        values: numbers, at least one.
        baseline: as many numbers, in the same order.

    Raises:
        UserError: the sequences differ in length, or are empty.
    """
    n = len(values)
    if n != len(baseline) or not values:
        raise UserError(f"pairs need as many values as baselines: got {n} and {len(baseline)}")
    from scipy.stats import t

    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    if max(differences) - min(differences) <= 1e-9 * max(map(abs, [*values, *baseline])):
        return Estimate(differences[0], nan)
    return Estimate(mean(differences), float(t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5)


def binomial_half_width(share: float, n: int) -> float:
    """Return half the width of the 95 % interval of a share, 0 to 1, counted on ``n`` samples.

    z sqrt(p(1 - p) / (n + z^2)), where p = (n share + z^2 / 2) / (n + z^2) and z = 1.96: unlike
    sqrt(share (1 - share) / n) it is not 0 if all of ``n`` are right.

    Source: Agresti and Coull, The American Statistician 52(2), 1998.
    """
    z = 1.96
    more = n + z**2
    p = (n * share + z**2 / 2) / more
    return z * (p * (1 - p) / more) ** 0.5


def over_seeds(
    values: Mapping[int, float], baseline: Mapping[int, float], by: Metric
) -> dict[str, float]:
    """Return a rule's mean, spread, difference and half interval, by the metric's columns.

    Args:
        values: values by seed, in the metric's unit; NaN for runs that diverged and do not count.
        baseline: values of the baseline by seed, as above.
        by: the metric.

    Raises:
        UserError: they share no seed.
    """
    shared = [seed for seed in values if seed in baseline]
    if not shared:
        mine, theirs = (", ".join(map(str, of)) or "none" for of in (values, baseline))
        raise UserError(
            f"runs are paired by their seeds, and share none: got {mine} and {theirs}; train both"
            " with the same seeds"
        )
    pairs = [(values[seed], baseline[seed]) for seed in shared]
    pairs = [pair for pair in pairs if not any(map(isnan, pair))]
    difference = paired_difference(*zip(*pairs, strict=True)) if pairs else Estimate(nan, nan)
    known = [value for value in values.values() if not isnan(value)]
    spread = stdev(known) if len(known) > 1 else nan
    found = mean(known or [nan]), spread, difference.mean, difference.half_width
    return dict(zip(by.columns, found, strict=True))


def delay_means(delays: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    """Average delay diagnostics over training steps, one row per combination of columns ``by``.

    Rows have the fields of :class:`toolkit.runtime.microbatches.StageDelay`, or are means of them,
    which have no step; what was not measured at a step is left out. So is the first training step,
    if there are others: nothing is late in it yet.
    """
    if not delays:
        return []
    import pandas as pd

    later = [row for row in delays if row.get("step", 1) > 0]
    groups = pd.DataFrame(later or delays).groupby([*by], as_index=False, sort=False)
    return groups[_DELAY_MEASURES].mean().to_dict("records")

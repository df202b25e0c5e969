"""Means, spreads and paired differences over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import mean, stdev
from typing import Any

from toolkit.errors import UserError
from toolkit.format import count
from toolkit.metric import Metric

_DELAY_MEASURES = ["delay", "cosine", "gradient", "fresh_gradient", "moved", "weights"]


@dataclass(frozen=True)
class Estimate:
    """A mean and half the width of its 95 % interval.

    The half width is NaN for values without a spread: a single one, or equal ones, which small
    counts often are.

    Attributes:
        mean: mean, in the unit of the values.
        half_width: half the width of the interval, in the same unit.
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
        raise UserError(
            f"pairs need as many values as baselines: got {n} and {len(baseline)}"
        )
    from scipy.stats import t

    # In pairs by seed, what the seed does to both cancels, so that the interval is narrower.
    differences = [value - base for value, base in zip(values, baseline, strict=True)]
    # Differences that are equal up to rounding have no spread to estimate.
    if max(differences) - min(differences) <= 1e-9 * max(
        map(abs, [*values, *baseline])
    ):
        return Estimate(differences[0], nan)
    return Estimate(
        mean(differences), float(t.ppf(0.975, n - 1)) * stdev(differences) / n**0.5
    )


@dataclass(frozen=True)
class Equivalence:
    """What paired runs show of a difference, against a margin below which it does not matter.

    Attributes:
        p: larger p-value of two one-sided paired t-tests, whose null hypotheses are that the values
            are worse, and that they are better, than the baseline by the margin or more.
        verdict: "equivalent within M" if ``p`` is below 0.05; else "worse by at least X", the near
            end of the 95 % interval, if it leaves out 0; else "at most M worse" if the first test
            alone is below 0.05; else "not shown". Empty without a spread.
    """

    p: float
    verdict: str


def equivalence(
    values: Sequence[float], baseline: Sequence[float], margin: float, by: Metric
) -> Equivalence:
    """Test whether values are equivalent to a baseline, pair by pair (TOST).

    Args:
        values: numbers, at least one.
        baseline: as many numbers, in the same order.
        margin: largest difference that does not matter, in the unit of the values.
        by: metric of the values, which says whether smaller ones are better.

    Raises:
        UserError: the margin is not above 0, or the sequences do not pair.

    Source: Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15(6), 1987.
    """
    check_margin(margin)
    difference = paired_difference(values, baseline)
    if isnan(difference.half_width):
        return Equivalence(nan, "")
    from scipy.stats import t

    df = len(values) - 1
    # The standard error of the mean, back from the half width.
    error = difference.half_width / float(t.ppf(0.975, df))
    # From here on more is better, for accuracies and losses alike.
    gain = difference.mean
    if by.lower_is_better:
        gain = -gain
    # One-sided tests: is the gain above -margin, and is it below +margin?
    p_worse = float(t.sf((margin + gain) / error, df))
    p_better = float(t.sf((margin - gain) / error, df))
    least_loss = -gain - difference.half_width  # the near end of the interval
    # In this order: a loss that is certain but small is still equivalent within the margin.
    if max(p_worse, p_better) < 0.05:
        verdict = f"equivalent within {margin:g}"
    elif least_loss > 0:
        verdict = f"worse by at least {least_loss:.{by.decimals}f}"
    elif p_worse < 0.05:
        verdict = f"at most {margin:g} worse"
    else:
        verdict = "not shown"
    return Equivalence(max(p_worse, p_better), verdict)


def check_margin(margin: float | None) -> None:
    """Raise UserError for a margin that is not above 0; None is no margin."""
    if margin is not None and not margin > 0:
        raise UserError(
            f"margin is the largest difference that does not matter, above 0: got {margin}"
        )


def binomial_half_width(share: float, n: int) -> float:
    """Return half the width of the 95 % interval of a share, 0 to 1, counted on ``n`` samples.

    z sqrt(p(1 - p) / (n + z^2)), where p = (n share + z^2 / 2) / (n + z^2) and z = 1.96: unlike
    sqrt(share (1 - share) / n) it is not 0 if all of ``n`` are right.

    Args:
        share: share of the samples, 0 to 1.
        n: number of samples.

    Source: Agresti and Coull, The American Statistician 52(2), 1998.
    """
    z = 1.96
    corrected_n = n + z**2
    p = (n * share + z**2 / 2) / corrected_n
    return z * (p * (1 - p) / corrected_n) ** 0.5


def over_seeds(
    values: Mapping[int, float],
    baseline: Mapping[int, float],
    by: Metric,
    margin: float | None = None,
) -> dict[str, Any]:
    """Return a rule's mean, spread, difference and half interval, by the metric's columns.

    With a margin, also ``margin``, ``equivalence_p`` and ``verdict``, as :class:`Equivalence` has.

    Args:
        values: values by seed, in the metric's unit; NaN for runs that diverged and do not count.
        baseline: values of the baseline by seed, as above.
        by: the metric.
        margin: largest difference that does not matter, in the metric's unit of differences.

    Raises:
        UserError: they share no seed, or the margin is not above 0.
    """
    shared = [seed for seed in values if seed in baseline]
    if not shared:
        value_seeds = ", ".join(map(str, values)) or "none"
        baseline_seeds = ", ".join(map(str, baseline)) or "none"
        raise UserError(
            f"runs are paired by their seeds, and share none: got {value_seeds} and"
            f" {baseline_seeds}; train both with the same seeds"
        )
    # A sum is NaN if either value is: a pair counts if both runs have ended.
    paired_seeds = [seed for seed in shared if not isnan(values[seed] + baseline[seed])]
    # Both in the order of the pairs, since the tests compare place by place.
    paired_values = [values[seed] for seed in paired_seeds]
    paired_baseline = [baseline[seed] for seed in paired_seeds]
    difference = Estimate(nan, nan)
    if paired_seeds:
        difference = paired_difference(paired_values, paired_baseline)
    # The mean is of all runs that have ended; the difference only of pairs.
    final_values = [value for value in values.values() if not isnan(value)]
    spread = nan
    if len(final_values) > 1:
        spread = stdev(final_values)
    mean_column, spread_column, difference_column, half_width_column = by.columns
    row: dict[str, Any] = {
        mean_column: mean(final_values or [nan]),
        spread_column: spread,
        difference_column: difference.mean,
        half_width_column: difference.half_width,
    }
    if margin is not None:
        test = Equivalence(nan, "")
        if paired_seeds:
            test = equivalence(paired_values, paired_baseline, margin, by)
        row |= {"margin": margin, "equivalence_p": test.p, "verdict": test.verdict}
    return row


def interval(row: Mapping[str, Any], by: Metric) -> tuple[float, float]:
    """Return both ends of the 95 % interval of a row of :func:`over_seeds`."""
    _, _, difference_column, half_width_column = by.columns
    return Estimate(row[difference_column], row[half_width_column]).interval


def says(low: float, high: float) -> str:
    """Return what an interval says about a difference, in words."""
    if isnan(low):
        return "no spread: nothing"
    if high < 0:
        return "lower"
    if low > 0:
        return "higher"
    return "no difference shown"


def in_a_sentence(
    rule: str,
    first: str,
    row: Mapping[str, Any],
    n_runs: int,
    by: Metric,
    margin: float | None,
) -> str:
    """Return a row of :func:`over_seeds`, of ``rule`` against rule ``first``, as a sentence."""
    low, high = interval(row, by)
    difference = row[by.columns[2]]
    side = "below" if difference < 0 else "above"
    line = f"{rule} ends {abs(difference):.{by.decimals}f} {by.unit_of_differences} {side} {first}"
    if isnan(low):
        line += f", with {count(n_runs, 'run')} and no spread: this shows nothing"
    else:
        line += f" (interval {low:+.{by.decimals}f} to {high:+.{by.decimals}f}): {says(low, high)}"
    verdict = row.get("verdict")
    if verdict == "not shown":
        line += f"; equivalence within {margin:g} is not shown"
    elif verdict:
        line += f"; {verdict}"
    return f"{line}."


def delay_means(
    delays: Sequence[Mapping[str, Any]], by: Sequence[str]
) -> list[dict[str, Any]]:
    """Average delay diagnostics over training steps, one row per combination of columns ``by``.

    Values that were not measured at a step are left out. So is the first training step, if there
    are others: its weights are not late yet.

    Args:
        delays: rows with the fields of :class:`toolkit.runtime.microbatches.StageDelay`, or means
            of them, which have no step.
        by: columns to group by, such as ``stage``.
    """
    if not delays:
        return []
    import pandas as pd

    # Means that are averaged again have no step, and count as later rows.
    later_rows = [row for row in delays if row.get("step", 1) > 0]
    groups = pd.DataFrame(later_rows or delays).groupby(
        [*by], as_index=False, sort=False
    )
    return groups[_DELAY_MEASURES].mean().to_dict("records")

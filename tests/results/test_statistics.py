import math
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.results import (
    binomial_half_width,
    equivalence,
    over_seeds,
    paired_difference,
)

VALUES = st.floats(-100, 100).map(lambda value: round(value, 3))


@pytest.fixture(scope="module", autouse=True)
def stats():
    """Seconds to load: not for tests of other modules to wait, nor of an example's time."""
    from scipy import stats

    return stats


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=8))
def test_interval_is_that_of_the_paired_t_test(stats, pairs):
    values, baseline = map(list, zip(*pairs, strict=True))
    if np.ptp(np.subtract(values, baseline)) < 1e-6:
        return  # scipy's interval is undefined where all differences are equal
    expected = stats.ttest_rel(values, baseline).confidence_interval(0.95)
    found = paired_difference(values, baseline)
    assert found.interval == pytest.approx(
        (expected.low, expected.high), rel=1e-6, abs=1e-9
    )
    assert found.mean == pytest.approx(np.mean(np.subtract(values, baseline)), abs=1e-9)


@pytest.mark.parametrize(
    ("values", "baseline", "difference"),
    [([2.0 + by, 3.0 + by, 5.3 + by], [2.0, 3.0, 5.3], by) for by in (1.0, 0.1, 0.0)]
    + [([2.0], [1.5], 0.5)],
)
def test_equal_differences_or_a_single_one_show_no_spread(values, baseline, difference):
    """They claim no certainty: counts of few images are equal by chance."""
    found = paired_difference(values, baseline)
    assert found.mean == pytest.approx(difference)
    assert math.isnan(found.half_width)


@pytest.mark.parametrize(("values", "baseline"), [([1.0], [1.0, 2.0]), ([], [])])
def test_values_that_do_not_pair_are_refused(values, baseline):
    with pytest.raises(UserError, match=f"got {len(values)} and {len(baseline)}"):
        paired_difference(values, baseline)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=2, max_size=8), st.floats(0.1, 50))
def test_p_is_the_larger_of_two_one_sided_t_tests(stats, pairs, margin):
    values, baseline = map(np.array, zip(*pairs, strict=True))
    if np.ptp(values - baseline) < 1e-6:
        return
    worse = stats.ttest_rel(values + margin, baseline, alternative="greater").pvalue
    better = stats.ttest_rel(values - margin, baseline, alternative="less").pvalue
    found = equivalence(values.tolist(), baseline.tolist(), margin, ACCURACY)
    assert found.p == pytest.approx(max(worse, better), rel=1e-6, abs=1e-9)
    assert found.verdict.startswith("equivalent") == (found.p < 0.05)


def test_equivalence_by_hand():
    """Differences 0, 1 and 2: mean 1, standard error 1/sqrt(3); t with 2 degrees of freedom has
    the closed form P(T > x) = (1 - x / sqrt(x^2 + 2)) / 2.
    """
    x = (3 - 1) * math.sqrt(3)
    expected = (1 - x / math.sqrt(x**2 + 2)) / 2
    found = equivalence([10.0, 21.0, 32.0], [10.0, 20.0, 30.0], 3, ACCURACY)
    assert found.p == pytest.approx(expected)  # 0.0371
    assert found.verdict == "equivalent within 3"


@pytest.mark.parametrize(
    ("differences", "margin", "by", "verdict"),
    [
        ([-0.1, 0.0, 0.1], 0.5, ACCURACY, "equivalent within 0.5"),
        ([-0.1, 0.0, 0.1], 0.1, ACCURACY, "not shown"),
        # The interval is -5 +- 4.303 / sqrt(3).
        ([-6.0, -5.0, -4.0], 1, ACCURACY, "worse by at least 2.52"),
        ([-6.0, -5.0, -4.0], 1, LOSS, "at most 1 worse"),
        ([6.0, 5.0, 4.0], 1, LOSS, "worse by at least 2.516"),
        ([6.0, 5.0, 4.0], 1, ACCURACY, "at most 1 worse"),
        # Surely worse, and by less than what matters.
        ([-0.3, -0.2, -0.25], 1, ACCURACY, "equivalent within 1"),
        ([1.0], 2, ACCURACY, ""),
        ([1.0, 1.0, 1.0], 2, ACCURACY, ""),
    ],
)
def test_verdicts(differences, margin, by, verdict):
    values = [50 + difference for difference in differences]
    found = equivalence(values, [50.0] * len(values), margin, by)
    assert found.verdict == verdict
    assert math.isnan(found.p) == (verdict == "")


@pytest.mark.parametrize("margin", [0, -1.0, math.nan])
def test_a_margin_is_above_0(margin):
    with pytest.raises(UserError, match=f"above 0: got {margin}"):
        equivalence([1.0, 2.0], [1.0, 3.0], margin, ACCURACY)


def test_only_a_margin_adds_a_verdict():
    values, baseline = (
        {0: 91.0, 1: math.nan, 2: 71.0, 3: 73.0},
        {0: 90.0, 1: 80.0, 2: 70.5, 3: 72},
    )
    tested = equivalence([91.0, 71.0, 73.0], [90.0, 70.5, 72.0], 2, ACCURACY)
    plain = over_seeds(values, baseline, ACCURACY)
    found = over_seeds(values, baseline, ACCURACY, 2)
    new = {"margin": 2, "equivalence_p": tested.p, "verdict": tested.verdict}
    assert tested.verdict == "equivalent within 2"
    assert found == plain | new
    lost = over_seeds({0: math.nan}, {0: 1.0}, ACCURACY, 2)
    assert lost["verdict"] == ""


def summary(values, baseline):
    return [*over_seeds(values, baseline, ACCURACY).values()]


def test_runs_pair_by_seed_in_any_order():
    values = {2: 71.0, 7: 5.0, 0: 92.0, 1: 81.0}
    expected = paired_difference([1.0, 2.0, 1.0], [0.0, 0.0, 0.0])
    assert summary(values, {0: 90.0, 1: 80.0, 2: 70.0}) == [
        *(mean(values.values()), stdev(values.values())),
        *(expected.mean, expected.half_width),
    ]


def test_a_diverged_run_counts_in_no_mean_and_no_pair():
    baseline = {0: 90.0, 1: 80.0, 2: math.nan, 3: 70.0}
    found = summary({0: 91.0, 1: math.nan, 2: 71.0, 3: 73.0}, baseline)
    expected = paired_difference([91.0, 73.0], [90.0, 70.0])
    assert found[0] == mean([91, 71, 73])
    assert found[2:] == [expected.mean, expected.half_width]
    assert summary({0: 91.0}, {0: math.nan}) == pytest.approx(
        [91, *[math.nan] * 3], nan_ok=True
    )


@pytest.mark.parametrize(
    ("values", "seeds"), [({3: 1.0, 4: 1.0}, "3, 4"), ({}, "none")]
)
def test_runs_without_a_shared_seed_do_not_pair(values, seeds):
    with pytest.raises(UserError, match=f"got {seeds} and 0, 1"):
        summary(values, {0: 1.0, 1: 1.0})


def test_a_binomial_interval_by_hand():
    """90 of 100, of which z^2 more are added, half of them right: 91.92 of 103.84."""
    p = 91.9208 / 103.8416
    assert binomial_half_width(0.9, 100) == pytest.approx(
        1.96 * math.sqrt(p * (1 - p) / 103.8416)
    )
    for share in (0.0, 1.0):
        assert 0 < binomial_half_width(share, 100) < 0.04
    assert binomial_half_width(0.5, 10_000) == pytest.approx(0.0098, rel=1e-3)

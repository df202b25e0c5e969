import math
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UserError
from toolkit.metric import ACCURACY
from toolkit.results import binomial_half_width, over_seeds, paired_difference

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
    assert found.interval == pytest.approx((expected.low, expected.high), rel=1e-6, abs=1e-9)
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
    assert summary({0: 91.0}, {0: math.nan}) == pytest.approx([91, *[math.nan] * 3], nan_ok=True)


@pytest.mark.parametrize(("values", "seeds"), [({3: 1.0, 4: 1.0}, "3, 4"), ({}, "none")])
def test_runs_without_a_shared_seed_do_not_pair(values, seeds):
    with pytest.raises(UserError, match=f"got {seeds} and 0, 1"):
        summary(values, {0: 1.0, 1: 1.0})


def test_a_binomial_interval_by_hand():
    """90 of 100, of which z^2 more are added, half of them right: 91.92 of 103.84."""
    p = 91.9208 / 103.8416
    assert binomial_half_width(0.9, 100) == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 103.8416))
    for share in (0.0, 1.0):
        assert 0 < binomial_half_width(share, 100) < 0.04
    assert binomial_half_width(0.5, 10_000) == pytest.approx(0.0098, rel=1e-3)

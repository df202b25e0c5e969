"""Offsets of workers on one device."""

import pytest

from toolkit.errors import UserError
from toolkit.plan.offsets import best_offsets
from toolkit.schedule import catalog


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_no_offsets_hold_less_than_the_cyclic_schedule(n):
    """The peak is (N+1)/2 models: the mean over time, so that nothing is less."""
    found = best_offsets([1.0] * n, n)
    assert found.peak == pytest.approx(found.bound) == n * (n + 1) / 2
    for schedule in (found.schedule, catalog.cyclic(n, placement="one")):
        assert schedule.lower(4).verify().peak_activations() == (found.peak,)


def test_unequal_stages():
    held = (5.0, 1.0, 1.0)
    found = best_offsets(held, 2)
    alive = [5, 6, 7, 7, 6, 5]
    peaks = [max(alive[t] + alive[t - k] for t in range(6)) for k in range(6)]
    assert found.peak == found.bound == min(peaks)
    assert found.schedule.period == 6


def test_mistakes():
    with pytest.raises(UserError, match="activations are 0 or more, of each stage"):
        best_offsets([1.0, -1.0], 2)
    with pytest.raises(UserError, match="the number of workers"):
        best_offsets([1.0], 0)

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.cost import UNIT, affordable_delay, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.schedule import catalog
from toolkit.schedule.steady_state import steps_to_time


def links(ratio):
    """A machine on which all parameters cross a link in ``ratio`` of a step's 2 s a stage."""
    return replace(UNIT, link_bandwidth=1 / (2 * ratio))


def seconds(schedule, hardware):
    program = schedule.lower(steps_to_time(schedule)).verify()
    return simulate(program, unit_costs(schedule.n_stages), hardware).step_time


@pytest.mark.parametrize("n", [2, 4, 5])
def test_links_without_limit_afford_the_freshest(n):
    freshest = catalog.cyclic(n)
    assert affordable_delay(freshest, unit_costs(n), UNIT) == freshest.staleness


def test_very_slow_links_afford_what_never_waits():
    late = catalog.cyclic(4, 1, chains="rotated")
    assert affordable_delay(late, unit_costs(4), links(4.0)) == late.staleness


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(2, 4),
    ratio=st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.5]),
    within=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    chains=st.sampled_from(["in_order", "rotated"]),
)
def test_a_step_is_within_the_limit_and_no_stage_can_be_fresher(n, ratio, within, chains):
    late, hardware = catalog.cyclic(n, 1, chains=chains), links(ratio)
    delay = affordable_delay(late, unit_costs(n), hardware, within=within)
    limit = (1 + within) * seconds(late, hardware)
    assert seconds(replace(late, delay=delay), hardware) <= limit
    least = catalog.cyclic(n).staleness
    assert all(
        least[j][m] <= steps <= 1 for j, row in enumerate(delay) for m, steps in enumerate(row)
    )
    for stage, row in enumerate(delay):
        # The micro-batch that would be fresh next: the last of those that are late for no need.
        late_ones = [m for m in range(n) if row[m] > least[stage][m]]
        if late_ones:
            fresher = [*row]
            fresher[late_ones[-1]] = 0
            try:
                guess = replace(late, delay=[*delay[:stage], fresher, *delay[stage + 1 :]])
            except UserError:
                continue
            assert seconds(guess, hardware) > limit


def test_more_time_buys_fresher_weights():
    late = catalog.cyclic(4, 1, chains="rotated")
    means = [
        replace(late, delay=affordable_delay(late, unit_costs(4), links(1.0), within=share))
        for share in (0.0, 0.1, 0.3)
    ]
    assert 1 >= means[0].mean_staleness > means[1].mean_staleness > means[2].mean_staleness


@pytest.mark.parametrize("within", [-0.1, "much", float("nan")])
def test_refuses_an_impossible_share(within):
    with pytest.raises(UserError, match="within"):
        affordable_delay(catalog.cyclic(2), unit_costs(2), UNIT, within=within)

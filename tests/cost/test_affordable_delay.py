from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.cost import (
    UNIT,
    affordable_delay,
    affordable_schedule,
    simulate,
    unit_costs,
)
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


def test_slow_links_afford_what_never_waits():
    late = catalog.cyclic(4, 1, chains="rotated")
    assert affordable_delay(late, unit_costs(4), links(2.0)) == late.staleness


def test_the_least_of_all_delays():
    """All parameters cross a link in the time of a step; all delays of three stages are tried."""
    late, hardware = catalog.cyclic(3, 1, chains="rotated"), links(1.0)
    limit, most = 1.3 * seconds(late, hardware), 0
    open_ones = [
        (j, m)
        for j, row in enumerate(catalog.cyclic(3).staleness)
        for m in range(3)
        if not row[m]
    ]
    for fresh in product((0, 1), repeat=len(open_ones)):
        delay = [[1] * 3 for _ in range(3)]
        for (j, m), is_fresh in zip(open_ones, fresh, strict=True):
            delay[j][m] -= is_fresh
        with suppress(UserError):
            if seconds(replace(late, delay=delay), hardware) <= limit:
                most = max(most, sum(fresh))
    found = affordable_delay(late, unit_costs(3), hardware, within=0.3)
    assert sum(map(sum, found)) == 9 - most < 9


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(2, 4),
    ratio=st.sampled_from([0.25, 0.5, 0.8, 1.0, 1.5]),
    within=st.sampled_from([0.0, 0.02, 0.1, 0.3]),
    chains=st.sampled_from(["in_order", "rotated"]),
)
def test_a_step_is_within_the_limit_and_nothing_can_be_fresher(
    n, ratio, within, chains
):
    late, hardware = catalog.cyclic(n, 1, chains=chains), links(ratio)
    delay = affordable_delay(late, unit_costs(n), hardware, within=within)
    limit = (1 + within) * seconds(late, hardware)
    assert seconds(replace(late, delay=delay), hardware) <= limit
    least = catalog.cyclic(n).staleness
    assert all(
        least[j][m] <= steps <= 1
        for j, row in enumerate(delay)
        for m, steps in enumerate(row)
    )
    late_ones = [
        (j, m) for j in range(n) for m in range(n) if delay[j][m] > least[j][m]
    ]
    for stage, microbatch in late_ones:
        fresher = [[*row] for row in delay]
        fresher[stage][microbatch] = 0
        with suppress(UserError):  # rotated chains refuse some
            assert seconds(replace(late, delay=fresher), hardware) > limit


def test_a_schedule_has_the_faster_chains():
    make, late = partial(catalog.cyclic, 4), catalog.cyclic(4, 1, chains="rotated")
    assert affordable_schedule(make, unit_costs(4), UNIT) == make()
    found = affordable_schedule(make, unit_costs(4), links(1.0), within=0.1)
    assert replace(found, delay=1) == late
    assert seconds(found, links(1.0)) <= 1.1 * seconds(late, links(1.0))
    assert make().mean_staleness < found.mean_staleness < 1
    with pytest.raises(UserError, match="groups divides the 4 workers"):
        affordable_schedule(partial(make, groups=3), unit_costs(4), UNIT)


def test_more_time_buys_fresher_weights():
    late = catalog.cyclic(4, 1, chains="rotated")
    means = [
        replace(
            late, delay=affordable_delay(late, unit_costs(4), links(1.0), within=share)
        )
        for share in (0.0, 0.1, 0.3)
    ]
    assert (
        1 >= means[0].mean_staleness > means[1].mean_staleness > means[2].mean_staleness
    )


@pytest.mark.parametrize("within", [-0.1, "much", float("nan")])
def test_refuses_an_impossible_share(within):
    with pytest.raises(UserError, match="within"):
        affordable_delay(catalog.cyclic(2), unit_costs(2), UNIT, within=within)

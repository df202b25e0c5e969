"""Timings, numbers and delays as NumPy has them, and schedules as keys."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.schedule.strategies import quick, schedules
from toolkit.errors import UserError, whole
from toolkit.schedule import Kind, Op, RandomDelay, Schedule, catalog, timing

FOUR, TWO, ONE = np.int64(4), np.uint8(2), np.int16(1)


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (lambda: catalog.data_parallel(FOUR, n_stages=TWO), catalog.data_parallel(4, n_stages=2)),
        (lambda: catalog.cyclic(FOUR, TWO, accumulate=TWO), catalog.cyclic(4, 2, accumulate=2)),
        (lambda: catalog.interleaved_1f1b(FOUR, FOUR, TWO), catalog.interleaved_1f1b(4, 4, 2)),
        (lambda: catalog.zero_bubble(FOUR, TWO), catalog.zero_bubble(4, 2)),
        (
            lambda: catalog.cyclic(2, RandomDelay(least=np.int8(1), most=TWO, seed=FOUR)),
            catalog.cyclic(2, RandomDelay(least=1, most=2, seed=4)),
        ),
        (
            lambda: Schedule(
                "own", FOUR, TWO, catalog.cyclic(2, n_stages=4).timing, delay=TWO, accumulate=ONE
            ),
            Schedule("own", 4, 2, catalog.cyclic(2, n_stages=4).timing, delay=2),
        ),
    ],
    ids=["DP", "CDP", "interleaved", "zero bubble", "random", "own"],
)
def test_numpys_whole_numbers_are_numbers(make, plain):
    made = make()
    assert made == plain
    assert repr(made) == repr(plain)
    assert {type(n) for n in (made.n_stages, made.n_microbatches, made.accumulate)} == {int}
    assert repr(made.lower(np.int64(3), np.int64(1)).ranks) == repr(plain.lower(3, 1).ranks)


@pytest.mark.parametrize(
    ("delay", "plain"),
    [
        (np.ones((3, 3), int), [[1, 1, 1]] * 3),
        (np.array([1, 2, 1], np.int8), [1, 2, 1]),
        (np.array(1), 1),
        ([np.array([1, 2, 3]), [1, 1, np.int64(2)], (3, 1, 1)], [[1, 2, 3], [1, 1, 2], [3, 1, 1]]),
        (range(1, 4), [1, 2, 3]),
    ],
    ids=["matrix", "by stage", "number", "rows", "range"],
)
def test_a_delay_in_an_array(delay, plain):
    made = catalog.cyclic(3, delay)
    assert made == catalog.cyclic(3, plain)
    assert repr(made) == repr(catalog.cyclic(3, plain))
    assert hash(made) == hash(catalog.cyclic(3, plain))
    orders = ["0F0 0B0", "1F0 1B0"]
    late = Schedule.from_rank_orders(orders, delay=np.array([1, 0]))
    assert late == Schedule.from_rank_orders(orders, delay=[1, 0])


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        (np.zeros((2, 3), int), r"3 x 3 .* got \(\(0, 0, 0\), \(0, 0, 0\)\)"),
        (np.full((3, 3), 0.5), r"0\.5"),
        (np.ones(3, bool), r"True"),
    ],
)
def test_an_array_that_is_no_delay(delay, message):
    with pytest.raises(UserError, match=message):
        catalog.cyclic(3, delay)


@given(schedules())
@quick
def test_equal_schedules_hash_alike(schedule):
    timing = replace(schedule.timing, starts=dict(reversed(schedule.timing.starts.items())))
    delay = schedule.delay
    if isinstance(delay, tuple):
        delay = [list(row) if isinstance(row, tuple) else row for row in delay]
    again = replace(schedule, timing=timing, delay=delay)
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert {schedule: 1}[again] == 1
    assert replace(schedule, name="another") not in {schedule}


@pytest.mark.parametrize(
    "make",
    [
        lambda: catalog.cyclic(10**30),
        lambda: catalog.cyclic(4, accumulate=10**30),
        lambda: catalog.one_f_one_b(1, 2**20 + 1),
        lambda: catalog.published(10**9),
        lambda: Schedule("own", 2**20, 2, catalog.cyclic(2).timing),
    ],
)
def test_more_than_can_be_made_is_refused(make):
    with pytest.raises(UserError, match="at most 1048576 forwards"):
        make()


@pytest.mark.parametrize("value", [0, 1.0, np.float64(1), True, np.True_, None, "1", np.ones(1)])
def test_what_is_no_size(value):
    with pytest.raises(UserError, match="the size is a whole number, 1 or more: got"):
        whole(value, "the size", 1)


@pytest.mark.parametrize(("s", "m", "ticks"), [(3, 3, 1), (4, 3, 3), (3, 4, 2), (2, 6, 3)])
def test_the_tick_is_as_coarse_as_can_be(s, m, ticks):
    assert timing.cyclic(s, m).ticks_per_slot == ticks


@pytest.mark.parametrize(
    ("starts", "period", "message"),
    [
        ({Op(Kind.FORWARD, 0, 0): -2}, 4, "0F0.*-2"),
        ({Op(Kind.FORWARD, 0, 0): 0.5}, 4, r"0F0.*0\.5"),
        ({(Kind.FORWARD, 0, 0): 0}, 4, r"maps ops.* got \("),
        ({Op(Kind.FORWARD, 0, 0): 0}, 4.0, "period of a timing, in ticks, is a whole number"),
        ({Op(Kind.FORWARD, 0, 0): 0}, 0, "period of a timing, in ticks, is a whole number, 1 or"),
    ],
)
def test_what_is_no_timing(starts, period, message):
    with pytest.raises(UserError, match=message):
        timing.Timing(starts, period)

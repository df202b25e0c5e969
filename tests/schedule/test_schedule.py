"""Properties of schedules, what they refuse, NumPy's numbers, and schedules as keys."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick, schedules, split
from toolkit.errors import UserError, whole
from toolkit.schedule import (
    Assigned,
    Kind,
    Op,
    RandomDelay,
    Schedule,
    Timing,
    catalog,
    labels,
    timing,
)
from toolkit.schedule.dependencies import dependencies

F, B = Kind.FORWARD, Kind.BACKWARD
INPUT, WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
FOUR, TWO, ONE = np.int64(4), np.uint8(2), np.int16(1)


def make(starts):
    """A schedule of one stage and one micro-batch."""
    return Schedule(
        "own", 1, 1, Timing({Op(*op): at for op, at in starts.items()}, period=3)
    )


@pytest.mark.parametrize(("s", "n"), [(4, 4), (4, 2), (2, 4), (5, 3)])
@pytest.mark.parametrize("method", [catalog.data_parallel, catalog.cyclic])
def test_sharded_state_is_dealt_out_evenly(method, s, n):
    owners = method(n, state="sharded", n_stages=s).owners
    assert {owners.count(rank) for rank in range(n)} == {s // n, -(-s // n)}


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ({}, "needs .*found nothing;"),
        ({(F, 0, 0): 0}, "found forward;"),
        ({(B, 0, 0): 0}, "found backward;"),
        ({(F, 0, 0): 0, (INPUT, 0, 0): 1}, "found forward, backward_input;"),
        ({(F, 0, 0): 0, (WEIGHT, 0, 0): 1}, "found forward, backward_weight;"),
        ({(F, 0, 0): 0, (B, 0, 0): 1, (INPUT, 0, 0): 1, (WEIGHT, 0, 0): 2},
         "found forward, backward, backward_input, backward_weight;"),
        ({(F, 0, 0): 0, (B, 0, 0): 1, (F, 1, 0): 2}, "op 1F0 is outside 1 stages"),
        ({(F, 0, 0): 0, (B, 0, 0): 1, (F, 0, 1): 2}, "op 0F1 is outside 1 stages"),
        ({(F, 0, 0): 0, (B, 0, 0): 1, (B, -1, 0): 2}, "op -1B0 is outside 1 stages"),
        ({(F, 0, 0): 0, (B, 0, 0): 1, (B, 0, -1): 2}, "op 0B-1 is outside 1 stages"),
    ],
)  # fmt: skip
def test_refuses_missing_and_superfluous_ops(starts, message):
    with pytest.raises(UserError, match=message):
        make(starts)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
@quick
def test_refuses_an_op_that_starts_too_early(s, m, halves, data):
    """Any op but the first forward, put into the slot of what it needs."""
    when = split(s, range(m), 8 * s) if halves else timing.cyclic(s, m)
    op = data.draw(st.sampled_from([op for op in when.starts if op[:2] != (F, 0)]))
    earlier = data.draw(st.integers(1, when.ticks_per_slot))
    needed = max(dependencies(op, when.starts, s), key=when.end)
    starts = dict(when.starts) | {op: when.end(needed) - earlier}
    message = rf"(?s){op} starts before {needed}, .* {earlier} ticks.*\[{op}\]"
    with pytest.raises(UserError, match=message):
        Schedule(
            "own",
            s,
            m,
            Timing(starts, when.period, when.ticks_per_slot),
            "one",
            "freshest",
        )


def test_ops_between_slots_collide_where_a_period_ends():
    starts = {Op(F, 0, 0): 0, Op(B, 0, 0): 3}
    with pytest.raises(UserError, match="cannot run 0B0 and 0F0 in the same slot"):
        Schedule(
            "tight",
            1,
            1,
            Timing(starts, period=4, ticks_per_slot=2),
            "per_stage",
            delay=1,
        )


@pytest.mark.parametrize(
    ("starts", "period", "message"),
    [
        ({Op(F, 0, 0): -2}, 4, "0F0.*-2"),
        ({Op(F, 0, 0): 0.5}, 4, r"0F0.*0\.5"),
        ({(F, 0, 0): 0}, 4, r"maps ops.* got \("),
        ({Op(F, 0, 0): 0}, 4.0, r"period of a timing.* got 4\.0"),
        ({Op(F, 0, 0): 0}, 0, "period of a timing.* got 0"),
    ],
)
def test_refuses_an_invalid_timing(starts, period, message):
    with pytest.raises(UserError, match=message):
        Timing(starts, period)


def test_refuses_an_unknown_state():
    with pytest.raises(UserError, match=r"state 'zero': .* replicated, sharded"):
        catalog.cyclic(3, state="zero")


@pytest.mark.parametrize(
    "make",
    [
        lambda: catalog.cyclic(10**30),
        lambda: catalog.cyclic(4, accumulate=10**30),
        lambda: catalog.one_f_one_b(1, 2**17 + 1),
        lambda: catalog.published(10**9),
        lambda: Schedule("own", 2**17, 2, catalog.cyclic(2).timing),
    ],
)
def test_refuses_too_many_forwards(make):
    with pytest.raises(UserError, match="at most 131072 forwards"):
        make()


def test_repr_is_short():
    assert repr(catalog.one_f_one_b(4, 64)) == (
        "Schedule('1F1B', stages=4, microbatches=64, ranks=4, period=134, placement='per_stage',"
        " delay=0, state='replicated')"
    )
    assert "delay='by stage'" in repr(catalog.published(3))


def test_a_rank_that_has_nothing_to_do_holds_nothing():
    """There are more turns than micro-batches, and one step alone."""
    schedule = Schedule(
        "own", 8, 4, timing.pipelined(8, 4), "per_stage_and_microbatch", "freshest"
    )
    peaks = schedule.lower(1).verify().peak_activations()
    assert sorted(peaks) == [0] * 10 + [1] * 26


@pytest.mark.parametrize(
    ("schedule", "ticks"),
    [
        (catalog.cyclic(4, 1), 16),
        (catalog.zero_bubble(3, 8), 12),
        # Workers are 8 / 3 slots apart: three ticks a slot.
        (catalog.cyclic(3, n_stages=4), 48),
        (catalog.cyclic(9, state="sharded"), 2),
        (catalog.data_parallel(4, state="sharded"), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_lookahead_in_ticks(schedule, ticks):
    """Messages of a sharded state start little before their place: a rank holds its share."""
    assert schedule.lookahead == ticks


def test_labels_add_the_key_to_a_shared_name():
    names = {"dp": "DP", "late": "CDP delay 2", "later": "CDP delay 2"}
    expected = {
        "dp": "DP",
        "late": "CDP delay 2 (late)",
        "later": "CDP delay 2 (later)",
    }
    assert labels(names) == expected


@pytest.mark.parametrize(
    ("s", "m", "ticks"), [(3, 3, 1), (4, 3, 3), (3, 4, 2), (2, 6, 3)]
)
def test_ticks_are_as_coarse_as_possible(s, m, ticks):
    assert timing.cyclic(s, m).ticks_per_slot == ticks


# NumPy's numbers, and schedules as keys


@pytest.mark.parametrize(
    "value", [0, 1.0, np.float64(1), True, np.True_, None, "1", np.ones(1)]
)
def test_what_is_no_size(value):
    with pytest.raises(UserError, match="the size is a whole number, 1 or more: got"):
        whole(value, "the size", 1)


WHEN = timing.cyclic(4, 2)


@pytest.mark.parametrize(
    ("make", "sizes", "options", "plain"),
    [
        (catalog.data_parallel, (FOUR,), {"n_stages": TWO}, catalog.data_parallel(4, n_stages=2)),
        (catalog.cyclic, (FOUR, TWO), {"accumulate": TWO}, catalog.cyclic(4, 2, accumulate=2)),
        (catalog.cyclic, (2, RandomDelay(least=ONE, most=TWO, seed=FOUR)), {},
         catalog.cyclic(2, RandomDelay(least=1, most=2, seed=4))),
        (Schedule, ("own", FOUR, TWO, WHEN), {"delay": TWO, "accumulate": ONE},
         Schedule("own", 4, 2, WHEN, delay=2)),
    ],
)  # fmt: skip
def test_numpys_whole_numbers_are_numbers(make, sizes, options, plain):
    made = make(*sizes, **options)
    assert made == plain
    assert repr(made) == repr(plain)
    assert {type(n) for n in (made.n_stages, made.n_microbatches, made.accumulate)} == {
        int
    }
    assert repr(made.lower(np.int64(3), np.int64(1)).ranks) == repr(
        plain.lower(3, 1).ranks
    )


@pytest.mark.parametrize(
    ("delay", "plain"),
    [
        (np.ones((3, 3), int), [[1, 1, 1]] * 3),
        (np.array([1, 2, 1], np.int8), [1, 2, 1]),
        (np.array(1), 1),
        (
            [np.array([1, 2, 3]), [1, 1, np.int64(2)], (3, 1, 1)],
            [[1, 2, 3], [1, 1, 2], [3, 1, 1]],
        ),
        (range(1, 4), [1, 2, 3]),
    ],
    ids=["matrix", "by stage", "number", "rows", "range"],
)
def test_a_delay_in_an_array(delay, plain):
    made, expected = catalog.cyclic(3, delay), catalog.cyclic(3, plain)
    assert (made, repr(made), hash(made)) == (expected, repr(expected), hash(expected))
    orders = ["0F0 0B0", "1F0 1B0", "2F0 2B0"]
    late = Schedule.from_rank_orders(orders, delay=np.array([1, 0, 1]))
    assert late == Schedule.from_rank_orders(orders, delay=[1, 0, 1])


@given(schedules())
@quick
def test_equal_schedules_hash_alike(schedule):
    timing = replace(
        schedule.timing, starts=dict(reversed(schedule.timing.starts.items()))
    )
    delay = schedule.delay
    if isinstance(delay, tuple):
        delay = [list(row) if isinstance(row, tuple) else row for row in delay]
    again = replace(schedule, timing=timing, delay=delay)
    assert again == schedule
    assert {schedule: 1}[again] == 1
    assert replace(schedule, name="another") not in {schedule}


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule.from_csv(""), "a file's path, or its text: got ''"),
        (lambda: Schedule.from_csv(None), "got None"),
        (lambda: Schedule.from_csv("0F" + "1" * 5000 + "\n"), "row 1, column 1: '0F1"),
        (lambda: Schedule.from_rank_orders(LOOP), "rank 0, op 0"),
        (lambda: Schedule.from_rank_orders(3), "one for each rank: got 3"),
        (lambda: Schedule.from_rank_orders([3]), "rank 0 has a list of ops"),
        (lambda: catalog.cyclic(2, LOOP), "a delay is one number"),
        (lambda: Assigned(3), "got 3"),
        (lambda: Assigned([3]), r"got \[3\]"),
        (lambda: Assigned([[10**9]]), "at most 131072 ranks: got rank 1000000000"),
        (lambda: Timing([1], 2), r"maps ops to their starts: got \[1\]"),
    ],
)
def test_refuses_odd_input_at_once(make, message):
    with pytest.raises(UserError, match=message) as error:
        make()
    assert len(str(error.value)) < 300


def test_a_text_may_begin_with_the_mark_of_a_spreadsheet():
    text = catalog.gpipe(2, 2).to_csv()
    assert Schedule.from_csv("\ufeff" + text).timing == Schedule.from_csv(text).timing

"""What a schedule says of itself, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick, split
from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, Schedule, Timing, catalog, labels, timing

F, B = Kind.FORWARD, Kind.BACKWARD
INPUT, WEIGHT = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT


def make(starts):
    """A schedule of one stage and one micro-batch."""
    when = Timing({Op(*op): at for op, at in starts.items()}, period=3)
    return Schedule("own", 1, 1, when)


@pytest.mark.parametrize(("s", "n"), [(4, 4), (4, 2), (2, 4), (5, 3)])
@pytest.mark.parametrize("make_schedule", [catalog.data_parallel, catalog.cyclic])
def test_sharded_state_is_dealt_out_evenly(make_schedule, s, n):
    owners = make_schedule(n, state="sharded", n_stages=s).owners
    owned = [owners.count(rank) for rank in range(n)]
    assert max(owned) <= -(-s // n)
    assert min(owned) >= s // n


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ({}, "nothing"),
        ({(F, 0, 0): 0}, "forward"),
        ({(B, 0, 0): 0}, "backward"),
        ({(F, 0, 0): 0, (INPUT, 0, 0): 1}, "forward, backward_input"),
        ({(F, 0, 0): 0, (WEIGHT, 0, 0): 1}, "forward, backward_weight"),
        (
            {(F, 0, 0): 0, (B, 0, 0): 1, (INPUT, 0, 0): 1, (WEIGHT, 0, 0): 2},
            "forward, backward, backward_input, backward_weight",
        ),
    ],
)
def test_refuses_an_incomplete_timing(starts, found):
    with pytest.raises(UserError, match=f"stage 0 of micro-batch 0 .* {found}$"):
        make(starts)


def test_refuses_an_unknown_state():
    with pytest.raises(UserError, match=r"state 'zero': .* replicated, sharded"):
        catalog.cyclic(3, state="zero")


@pytest.mark.parametrize("op", [(F, 1, 0), (F, 0, 1), (B, -1, 0), (B, 0, -1)])
def test_refuses_an_op_outside(op):
    text = str(Op(*op))
    with pytest.raises(UserError, match=f"op {text} is outside 1 stages and 1 micro-batches"):
        make({(F, 0, 0): 0, (B, 0, 0): 1, op: 2})


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
@quick
def test_refuses_an_op_that_starts_too_early(s, m, halves, data):
    """Any op but the first forward, put into the slot of what it needs."""
    when = split(s, range(m), 8 * s) if halves else timing.cyclic(s, m)
    op = data.draw(st.sampled_from([op for op in when.starts if op[:2] != (F, 0)]))
    earlier = data.draw(st.integers(1, when.ticks_per_slot))
    needed = need(op, s, halves)
    starts = dict(when.starts) | {op: when.end(needed) - earlier}
    message = rf"(?s){op} starts before {needed}, .* {earlier} ticks.*\[{op}\]"
    with pytest.raises(UserError, match=message):
        Schedule("own", s, m, Timing(starts, when.period, when.ticks_per_slot), "one", "freshest")


def need(op, n_stages, halves):
    """What the op needs last."""
    kind, j, m = op
    if kind == F:
        return Op(F, j - 1, m)
    if kind == WEIGHT:
        return Op(INPUT, j, m)
    if j == n_stages - 1:
        return Op(F, j, m)
    return Op(INPUT if halves else B, j + 1, m)


def test_ops_between_slots_collide_where_a_period_ends():
    starts = {Op(Kind.FORWARD, 0, 0): 0, Op(Kind.BACKWARD, 0, 0): 3}
    with pytest.raises(UserError, match="cannot run 0B0 and 0F0 in the same slot"):
        Schedule("tight", 1, 1, Timing(starts, period=4, ticks_per_slot=2), "per_stage", delay=1)


def test_a_schedule_in_short():
    """However many micro-batches there are."""
    assert repr(catalog.one_f_one_b(4, 64)) == (
        "Schedule('1F1B', stages=4, microbatches=64, ranks=4, period=134, placement='per_stage',"
        " delay=0, state='replicated')"
    )
    assert "delay='by stage'" in repr(catalog.published(3))


def test_a_rank_that_has_nothing_to_do_holds_nothing():
    """There are more turns than micro-batches, and one step alone."""
    schedule = Schedule("own", 8, 4, timing.pipelined(8, 4), "per_stage_and_microbatch", "freshest")
    peaks = schedule.lower(1).verify().peak_activations()
    assert len(peaks) == 36
    assert sum(peaks) == 26
    assert {*peaks} == {0, 1}


@pytest.mark.parametrize(
    ("schedule", "ticks"),
    [
        (catalog.cyclic(4, 1), 16),
        (catalog.gpipe(3, 8), 12),
        (catalog.zero_bubble(3, 8), 12),
        (catalog.cyclic(3, n_stages=4), 48),  # workers are 8 / 3 slots apart: three ticks a slot
        (catalog.cyclic(4, 1, state="sharded"), 2),
        (catalog.cyclic(9, state="sharded"), 2),
        (catalog.data_parallel(4, state="sharded"), 2),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_lookahead_in_ticks(schedule, ticks):
    """Messages of a sharded state start little before their place: a rank holds its share."""
    assert schedule.lookahead == ticks


def test_a_name_that_schedules_share_is_told_with_its_key():
    names = {"dp": "DP", "late": "CDP delay 2", "cdp_v1": "CDP-v1", "later": "CDP delay 2"}
    assert labels(names) == {
        "dp": "DP",
        "late": "CDP delay 2 (late)",
        "cdp_v1": "CDP-v1",
        "later": "CDP delay 2 (later)",
    }

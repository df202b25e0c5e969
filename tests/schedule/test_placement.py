"""Where ops run: ranks by closed form, and no rank does two things at once."""

from itertools import product

import pytest
from hypothesis import given

from tests.schedule.strategies import quick, schedules, split
from toolkit.errors import UserError
from toolkit.schedule import Assigned, Schedule, catalog, timing

TIMINGS = {
    "simultaneous": timing.simultaneous,
    "cyclic": timing.cyclic,
    "sequential": lambda s, m: timing.simultaneous(s, 1, m),
}
SIZES = list(product(range(1, 7), repeat=2))
PLACEMENTS = ["one", "per_microbatch", "per_stage", "per_stage_and_microbatch"]


@pytest.mark.parametrize("n", range(2, 17))
def test_cyclic_stage_j_has_n_minus_j_replicas(n):
    layout = catalog.cyclic(n, placement="per_stage_and_microbatch").layout
    assert [len(layout.ranks(j)) for j in range(n)] == [n - j for j in range(n)]
    assert [rank for j in range(n) for rank in layout.ranks(j)] == list(range(layout.n_ranks))
    for j, m in product(range(n), repeat=2):
        assert layout.rank(j, m) == layout.ranks(j)[m % (n - j)]


def collide(when, rank_of, n_steps):
    """Whether two ops meet on a rank, by laying out ``n_steps`` steps."""
    busy = set()
    for step, (op, start) in product(range(n_steps), when.starts.items()):
        for tick in range(start, start + when.ticks_per_slot):
            place = rank_of(op, step), tick + step * when.period
            if place in busy:
                return True
            busy.add(place)
    return False


def rank_of(placement):
    rank = {"per_microbatch": lambda op: op.microbatch, "per_stage": lambda op: op.stage}[placement]
    return lambda op, step: rank(op)


@pytest.mark.parametrize(("s", "m"), SIZES)
@pytest.mark.parametrize("rule", TIMINGS)
@pytest.mark.parametrize("placement", ["per_microbatch", "per_stage"])
def test_refuses_exactly_what_collides(placement, rule, s, m):
    """With one op of the grid in brackets."""
    when = TIMINGS[rule](s, m)
    if not collide(when, rank_of(placement), 4):
        Schedule("s", s, m, when, placement, "freshest")
        return
    message = rf"in the same slot of .* '{placement}'.* {s} and {m}\nslot[^\[]*\n[^\[]*\[[^\[]*$"
    with pytest.raises(UserError, match=message):
        Schedule("s", s, m, when, placement, "freshest")


@given(schedules(placements=["per_microbatch", "per_stage", "per_stage_and_microbatch"]))
@quick
def test_no_accepted_schedule_collides(schedule):
    def rank(op, step):
        return schedule.rank(op.stage, op.microbatch, step)

    assert not collide(schedule.timing, rank, 12)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_places_a_split_backward(placement):
    """Both halves run where the forward ran, and are done before the rank is lent again."""
    when = split(2, (0, 6, 12), 18) if placement == "per_stage" else split(2, (0, 2, 4), 6)
    schedule = Schedule("split", 2, 3, when, placement, "freshest")
    schedule.lower(3).verify()
    if placement != "one":
        assert not collide(when, lambda op, t: schedule.rank(op.stage, op.microbatch, t), 8)


def test_the_refused_op_is_in_brackets():
    with pytest.raises(UserError, match="rank 0 cannot run 0F0 and 0F1") as refusal:
        catalog.data_parallel(2, "per_stage")
    assert "0F0/[0F1]" in str(refusal.value)


def test_refuses_an_unknown_placement():
    known = "one, per_microbatch, per_stage, per_stage_and_microbatch"
    with pytest.raises(UserError, match=f"placement 'One'.*{known}"):
        catalog.cyclic(3, placement="One")


def test_a_placement_of_ones_own():
    """Two pipelines in opposite directions on the same ranks, which cyclic timing lets meet."""
    table = [[0, 3, 0, 3], [1, 2, 1, 2], [2, 1, 2, 1], [3, 0, 3, 0]]
    schedule = Schedule("both ways", 4, 4, timing.cyclic(4, 4), Assigned(table), "freshest")
    assert schedule.n_ranks == 4
    assert [schedule.rank(0, m) for m in range(4)] == [0, 3, 0, 3]
    schedule.lower(4).verify()
    assert {len(schedule.layout.ranks(j)) for j in range(4)} == {2}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0]], r"a placement is \[stage\]\[microbatch\], here 2 of 2 each: got \(\(0,\),\)"),
        ([[0, 0], [1]], "here 2 of 2 each"),
        ([[0, 0], [1, -1]], "a rank is a whole number, 0 or more: got -1"),
        ([[0, 0], [1, 0.5]], "a rank is a whole number, 0 or more: got 0.5"),
        ([[0, 0], []], "a placement has the ranks of every stage: got"),
    ],
)
def test_what_is_no_placement(table, message):
    with pytest.raises(UserError, match=message):
        Schedule("wrong", 2, 2, timing.simultaneous(2, 2), Assigned(table))

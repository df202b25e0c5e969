"""Where ops run: ranks by closed form, and no rank does two things at once."""

from itertools import product
from math import lcm

import pytest
from hypothesis import given

from tests.schedule.strategies import quick, schedules, split
from toolkit.errors import UserError
from toolkit.schedule import (
    PLACEMENTS,
    Action,
    Assigned,
    Buffer,
    Schedule,
    catalog,
    timing,
)
from toolkit.schedule.reduction_order import share_ends

TIMINGS = {
    "simultaneous": timing.simultaneous,
    "cyclic": timing.cyclic,
    "sequential": lambda s, m: timing.simultaneous(s, 1, m),
}


@pytest.mark.parametrize("n", range(2, 17))
def test_cyclic_stage_j_has_n_minus_j_replicas(n):
    layout = catalog.cyclic(n, placement="per_stage_and_microbatch").layout
    ranks = iter(range(n * (n + 1) // 2))
    for j in range(n):
        of_stage = [next(ranks) for _ in range(n - j)]
        assert layout.ranks(j) == of_stage
        assert [layout.rank(j, m) for m in range(n)] == [
            of_stage[m % (n - j)] for m in range(n)
        ]
    assert layout.n_ranks == n * (n + 1) // 2


def test_ranks_take_turns_from_step_to_step():
    """Stage 1 has two ranks for three micro-batches. An owner ends its stage's last gradient."""
    schedule = catalog.cyclic(3, placement="per_stage_and_microbatch", state="sharded")
    tables = [
        [[schedule.rank(j, m, step) for m in range(3)] for j in range(3)]
        for step in range(3)
    ]
    even, odd = [[0, 1, 2], [3, 4, 3], [5, 5, 5]], [[0, 1, 2], [4, 3, 4], [5, 5, 5]]
    assert tables == [even, odd, even]
    assert [schedule.layout.turns(j) for j in range(3)] == [1, 2, 1]
    assert schedule.owners == (2, 3, 5)
    ends = [share_ends(schedule.timing, schedule.layout, j) for j in range(3)]
    assert ends == [{0: 6, 1: 8, 2: 10}, {3: 9, 4: 7}, {5: 8}]


def collide(when, rank_of, n_steps):
    """Whether two ops meet on a rank, by laying out ``n_steps`` steps."""
    busy = set()
    for step, (op, start) in product(range(n_steps), when.starts.items()):
        for tick in range(start, start + when.ticks_per_slot):
            place = rank_of(op.stage, op.microbatch, step), tick + step * when.period
            if place in busy:
                return True
            busy.add(place)
    return False


@pytest.mark.parametrize(("s", "m"), [*product(range(1, 7), repeat=2)])
@pytest.mark.parametrize("rule", TIMINGS)
def test_refuses_exactly_what_collides(rule, s, m):
    """With one op of the grid in brackets."""
    when = TIMINGS[rule](s, m)
    ranks = {"per_microbatch": lambda j, m, step: m, "per_stage": lambda j, m, step: j}
    for placement, rank_of in ranks.items():
        if not collide(when, rank_of, 4):
            Schedule("s", s, m, when, placement, "freshest")
            continue
        where = rf"in the same slot of .* '{placement}'.* {s} and {m}"
        with pytest.raises(UserError, match=rf"{where}\nslot[^\[]*\n[^\[]*\[[^\[]*$"):
            Schedule("s", s, m, when, placement, "freshest")


@given(schedules(placements=PLACEMENTS[1:]))
@quick
def test_no_accepted_schedule_collides(schedule):
    assert not collide(schedule.timing, schedule.rank, 12)


@given(schedules(placements=PLACEMENTS))
@quick
def test_says_whether_programs_send_activations(schedule):
    n_steps = lcm(*map(schedule.layout.turns, range(schedule.n_stages)))
    sent = {
        i.buffer
        for instructions in schedule.lower(n_steps).ranks
        for i in instructions
        if i.action == Action.SEND
    }
    assert schedule.layout.sends_activations == (Buffer.ACTIVATION in sent)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_places_a_split_backward(placement):
    """Both halves run where the forward ran, and are done before the rank is lent again."""
    when = (
        split(2, (0, 6, 12), 18) if placement == "per_stage" else split(2, (0, 2, 4), 6)
    )
    schedule = Schedule("split", 2, 3, when, placement, "freshest")
    schedule.lower(3).verify()
    assert placement == "one" or not collide(when, schedule.rank, 8)


def test_an_assigned_placement():
    """Two pipelines in opposite directions on the same ranks, which cyclic timing lets meet."""
    table = [[0, 3, 0, 3], [1, 2, 1, 2], [2, 1, 2, 1], [3, 0, 3, 0]]
    schedule = Schedule(
        "both ways", 4, 4, timing.cyclic(4, 4), Assigned(table), "freshest"
    )
    assert [[schedule.rank(j, m) for m in range(4)] for j in range(4)] == table
    schedule.lower(4).verify()
    assert schedule.n_ranks == 4
    assert {len(schedule.layout.ranks(j)) for j in range(4)} == {2}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("per_stage", r"(?s)rank 0 cannot run 0F0 and 0F1.*0F0/\[0F1\]"),
        (
            "One",
            "placement 'One'.*one, per_microbatch, per_stage, per_stage_and_microbatch",
        ),
        ([[0]], r"\[stage\]\[microbatch\], here 2 of 2 each: got \(\(0,\),\)"),
        ([[0, 0], [1]], "here 2 of 2 each"),
        ([[0, 0], [1, -1]], "a rank .*: got -1"),
        ([[0, 0], [1, 0.5]], "a rank .*: got 0.5"),
        ([[0, 0], []], "the ranks of every stage: got"),
    ],
)
def test_refuses(placement, message):
    kind = str if isinstance(placement, str) else Assigned
    with pytest.raises(UserError, match=message):
        Schedule("wrong", 2, 2, timing.simultaneous(2, 2), kind(placement))


@pytest.mark.parametrize("make", [catalog.data_parallel, catalog.cyclic])
def test_owners_are_dealt_out_by_what_a_placement_is(make):
    """Of sharded state, whatever the placement's name: ZeRO by rank orders is ZeRO."""
    named = make(4, state="sharded", delay=1)
    table = [[named.rank(j, m) for m in range(4)] for j in range(4)]
    assigned = Schedule(
        "mine", 4, 4, named.timing, Assigned(table), delay=1, state="sharded"
    )
    assert assigned.owners == named.owners == (3, 2, 1, 0)
    programs = [schedule.lower(3).verify() for schedule in (named, assigned)]
    assert programs[0].peak_weights() == programs[1].peak_weights()
    orders = ["0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"]
    zero = Schedule.from_rank_orders(orders, state="sharded").lower(2).verify()
    assert (
        zero.peak_weights()
        == catalog.data_parallel(2, state="sharded").lower(2).peak_weights()
    )

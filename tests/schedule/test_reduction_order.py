"""Chains of gradients: who sends what to whom, when, and what a schedule must leave time for."""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schedule.strategies import matrices, quick, random_delays, schedules, shifted
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Schedule, catalog, steady_state, timing
from toolkit.schedule.steady_state import footprint

SIZES = range(2, 17)
SIZED = [*((n, n) for n in SIZES), (2, 4), (3, 6), (4, 8), (5, 15)]


def rotated(n, delay=1, **sizes):
    return catalog.cyclic(n, delay, chains="rotated", **sizes)


def sent(program, stage=None):
    """(tick, what, step or version, from, to) of the messages of parameters, in order."""
    found = [
        (i.tick, i.buffer.name.lower(), i.step if i.version is None else i.version, rank, *i.peers)
        for rank, instructions in enumerate(program.ranks)
        for i in instructions
        if i.action == Action.SEND and stage in (None, i.stage)
    ]
    return sorted(found)


# Backwards of stage 0 end at 6, 8 and 10, of stage 1 at 5, 7, 9, of stage 2 at 4, 6, 8; the new
# weights of stage j are read from 12 + j, 14 + j and 16 + j.
ROTATED = {
    0: [(6, 0, 1), (8, 1, 2), (11, 2, 0), (13, 0, 1)],
    1: [(7, 1, 2), (9, 2, 0), (14, 0, 1), (16, 1, 2)],
    2: [(8, 2, 0), (8, 0, 1), (13, 1, 2), (13, 2, 0)],
}


def test_chains_of_three_ranks():
    """(tick, from, to): two hops of the gradient, then two of the weights."""
    program = rotated(3).lower(4)
    for j, messages in ROTATED.items():
        found = sent(program, j)
        gradient = [(at, *who) for at, what, of, *who in found if (what, of) == ("gradient", 0)]
        weights = [(at, *who) for at, what, of, *who in found if (what, of) == ("weights", 1)]
        assert (gradient, weights) == (sorted(messages[:2]), sorted(messages[2:]))


def test_a_ring_is_in_the_order_in_which_ranks_finish():
    """Micro-batch 1 starts first, then 2, then 0."""
    when = shifted(3, (4, 0, 2), 6)
    schedule = Schedule("own", 3, 3, when, "per_microbatch", 2, chains="rotated")
    assert schedule.rings == ((1, 2, 0), (2, 0, 1), (0, 1, 2))
    assert schedule.owners == (0, 1, 2)
    # Rank 0 starts first, and is the last to have run both its micro-batches, 0 and 2.
    when = shifted(1, (0, 2, 8, 6), 10)
    options = {"delay": 1, "chains": "rotated", "accumulate": 2}
    assert Schedule("own", 1, 4, when, "per_microbatch", **options).rings == ((1, 0),)


@pytest.mark.parametrize("chains", ["in_order", "rotated"])
def test_weights_do_not_wait_once_they_have_been_used(chains):
    """Rank 0 reads stage 0 in slot 24, and rank 1 in slot 28."""
    found = sent(catalog.cyclic(3, 1, n_stages=6, chains=chains).lower(4), 0)
    hops = [(at, *who) for at, what, of, *who in found if (what, of) == ("weights", 1)]
    assert hops == [(23, 2, 0), (25, 0, 1)]


@pytest.mark.parametrize(
    ("n", "n_stages", "accumulate"),
    [*((n, s, 1) for n, s in SIZED), (2, 2, 2), (3, 3, 2), (3, 6, 3), (4, 4, 2)],
)
def test_every_rank_does_as_much_as_any_other(n, n_stages, accumulate):
    """Of each stage it hands on a gradient and weights, except of one in n stages."""
    schedule = rotated(n, n_stages=n_stages, accumulate=accumulate)
    program = schedule.lower(5).verify()
    assert schedule.owners == tuple((j - 1) % n for j in range(n_stages))
    each = 2 * (n - 1) * (n_stages // n)
    for slots in zip(*steady_state(schedule).traffic, strict=True):
        assert sum(slot.messages for slot in slots) == sum(slot.units for slot in slots) == each
    ways = {(source, target) for *_, source, target in sent(program)}
    assert ways == {(rank, (rank + 1) % n) for rank in range(n)}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("delay", [1, 2])
def test_weights_go_on_as_late_as_all_ranks_to_come_allow(n, delay):
    """A slot before the first of them reads."""
    schedule = rotated(n, delay)
    program = schedule.lower(delay + 2)
    reads, came = {}, {}
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.version == 1 and i.action == Action.FORWARD:
                reads[i.stage, rank] = i.tick
            elif i.version == 1 and i.action == Action.RECV:
                came[i.stage, rank] = i.tick
    assert len(came) == n * (n - 1)
    for j, ring in enumerate(schedule.rings):
        assert ring == tuple((j + k) % n for k in range(n))
        for k, rank in enumerate(ring[:-1]):
            assert came[j, rank] == min(reads[j, other] for other in ring[k:-1]) - 1


@pytest.mark.parametrize("n", SIZES)
def test_what_it_asks_of_a_rank(n):
    """Fewer weights, as no rank makes every version; and messages that bunch."""
    found, in_order = footprint(rotated(n)), footprint(catalog.cyclic(n, 1))
    assert found == replace(
        in_order,
        weights=2 - Fraction(n > 2, n),
        traffic_in_slot=Fraction(2 if n > 2 else 1, n),
        rounds=n - 1,
    )


def read_by(i):
    """The weights that an instruction computes with or predicts from."""
    if i.action == Action.PREDICT:
        return i.predicted_from
    return [(i.stage, i.version)] if i.action.computes else []


@given(
    schedules(placements=["per_microbatch"], states=["replicated"], chains=["in_order"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.data(),
)
@quick
def test_any_timing_and_delay_that_leave_time(schedule, n_steps, first_step, data):
    """A step later than the timing allows always does. Versions go from hand to hand."""
    least = [[d + 1 for d in row] for row in schedule.staleness]
    drawn = random_delays(1 + schedule.max_staleness)
    schedule = replace(schedule, delay=data.draw(st.one_of(matrices(least), drawn)))
    m, n = schedule.n_microbatches, schedule.n_workers
    ends = [
        {max(schedule.timing.gradient_end(j, i) for i in range(w, m, n)) for w in range(n)}
        for j in range(schedule.n_stages)
    ]
    assume(n == 1 or all(len(of_stage) > 1 for of_stage in ends))
    schedule = replace(schedule, chains="rotated")
    program = schedule.lower(n_steps, first_step).verify()
    hops = defaultdict(list)
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action == Action.SEND and i.buffer == Buffer.WEIGHTS:
                hops[i.stage, i.version].append((rank, *i.peers))
            elif i.action == Action.UPDATE:
                assert rank == schedule.owners[i.stage] == schedule.rings[i.stage][-1]
    for (j, version), found in hops.items():
        ring = schedule.rings[j]
        way = [*zip((ring[-1], *ring), ring[:-1], strict=False)]
        assert Counter(found) == Counter(way[: len(found)])
        last = way[len(found) - 1][1]
        assert any((j, version) in read_by(i) for i in program.ranks[last])


@pytest.mark.parametrize("n", SIZES)
def test_refuses_weights_that_are_as_fresh_as_can_be(n):
    message = rf"(?s)stage 0 on micro-batch {n - 1} .* 0 steps late.* delay=1.*\[0F{n - 1}\]"
    with pytest.raises(UserError, match=message):
        rotated(n, "freshest")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": [[1, 1, 1], [1, 1, 1], [0, 1, 1]]}, "stage 2 on micro-batch 0 .*delay=1"),
        ({"delay": [[1, 1, 1], [1, 0, 1], [1, 1, 1]]}, "stage 1 on micro-batch 1 .*delay=1"),
        ({"delay": 1, "placement": "per_stage"}, "'per_stage'"),
        ({"delay": 1, "placement": "one"}, "'one'"),
        ({"delay": 1, "state": "sharded"}, "sharded"),
        ({"timing": timing.simultaneous(3, 3), "delay": 1}, "stage 0 .*in_order"),
        ({"chains": "Rotated"}, "chains 'Rotated'"),
        ({"chains": None}, "chains None"),
    ],
    ids=str,
)
def test_refuses(options, message):
    usual = {"timing": timing.cyclic(3, 3), "placement": "per_microbatch", "chains": "rotated"}
    with pytest.raises(UserError, match=message):
        Schedule("own", 3, 3, **usual | options)


def test_takes_entries_that_are_fresh_and_leave_time():
    assert rotated(3, [[1, 1, 1], [1, 1, 0], [1, 0, 0]]).lower(4).verify()

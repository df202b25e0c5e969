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
from toolkit.schedule.steady import footprint

SIZES = range(2, 17)
MORE_STAGES = [(2, 4), (3, 6), (4, 8), (5, 15)]
SOME = [(2, 2), (3, 3), (3, 4), (4, 3), (7, 2), (2, 4), (4, 8)]


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
IN_ORDER = {
    0: [(6, 0, 1), (8, 1, 2), (11, 2, 0), (13, 0, 1)],
    1: [(5, 0, 1), (7, 1, 2), (12, 2, 0), (14, 0, 1)],
    2: [(4, 0, 1), (6, 1, 2), (13, 2, 0), (15, 0, 1)],
}
ROTATED = {
    0: [(6, 0, 1), (8, 1, 2), (11, 2, 0), (13, 0, 1)],
    1: [(7, 1, 2), (9, 2, 0), (14, 0, 1), (16, 1, 2)],
    2: [(8, 2, 0), (8, 0, 1), (13, 1, 2), (13, 2, 0)],
}


@pytest.mark.parametrize(("chains", "expected"), [("in_order", IN_ORDER), ("rotated", ROTATED)])
def test_chains_of_three_ranks(chains, expected):
    """(tick, from, to): two hops of the gradient, then two of the weights."""
    program = catalog.cyclic(3, 1, chains=chains).lower(4)
    for j, messages in expected.items():
        found = sent(program, j)
        gradient = [(at, *who) for at, what, of, *who in found if (what, of) == ("gradient", 0)]
        weights = [(at, *who) for at, what, of, *who in found if (what, of) == ("weights", 1)]
        assert (gradient, weights) == (sorted(messages[:2]), sorted(messages[2:]))


def test_hops_at_one_tick_are_in_the_order_of_the_chain():
    """Stage 2 of the above: rank 0 receives rank 2's sum before it hands its own on, too."""
    program = rotated(3).lower(1)
    own = [
        i
        for i in program.ranks[0]
        if i.stage == 2 and i.buffer == Buffer.GRADIENT and i.action.communicates
    ]
    assert [(i.tick, i.action, i.peers) for i in own] == [
        (8, Action.RECV, (2,)),
        (8, Action.SEND, (1,)),
    ]


def test_a_ring_is_in_the_order_in_which_ranks_finish():
    """Micro-batch 1 starts first, then 2, then 0."""
    when = shifted(3, (4, 0, 2), 6)
    schedule = Schedule("own", 3, 3, when, "per_microbatch", 2, chains="rotated")
    assert schedule.rings == ((1, 2, 0), (2, 0, 1), (0, 1, 2))
    assert schedule.owners == (0, 1, 2)


@pytest.mark.parametrize("chains", ["in_order", "rotated"])
def test_weights_do_not_wait_once_they_have_been_used(chains):
    """Rank 0 reads stage 0 in slot 24, and rank 1 in slot 28."""
    found = sent(catalog.cyclic(3, 1, n_stages=6, chains=chains).lower(4), 0)
    hops = [(at, *who) for at, what, of, *who in found if (what, of) == ("weights", 1)]
    assert hops == [(23, 2, 0), (25, 0, 1)]


def test_chains_are_in_order_unless_asked_for():
    schedule = catalog.cyclic(3, 1)
    assert (schedule.chains, schedule.rings, schedule.owners) == ("in_order", (), (2, 2, 2))
    assert rotated(3) != schedule
    assert replace(rotated(3), chains="in_order", name="CDP-v1") == schedule


@pytest.mark.parametrize(("n", "n_stages"), [*((n, n) for n in SIZES), *MORE_STAGES])
def test_every_rank_does_as_much_as_any_other(n, n_stages):
    """Of each stage it hands on a gradient and weights, but for one in n stages."""
    schedule = rotated(n, n_stages=n_stages)
    schedule.lower(5).verify()
    assert schedule.owners == tuple((j - 1) % n for j in range(n_stages))
    by_rank = zip(*steady_state(schedule).traffic, strict=True)
    each = 2 * (n - 1) * (n_stages // n)
    for slots in by_rank:
        assert sum(slot.messages for slot in slots) == sum(slot.units for slot in slots) == each


@pytest.mark.parametrize("n", range(3, 17))
def test_in_order_some_ranks_send_less(n):
    """The check above can fail."""
    by_rank = zip(*steady_state(catalog.cyclic(n, 1)).traffic, strict=True)
    assert [sum(slot.messages for slot in slots) for slots in by_rank] == [2 * n] * (n - 2) + [n, n]


@pytest.mark.parametrize(("n", "n_stages"), [*((n, n) for n in SIZES), *MORE_STAGES])
def test_every_rank_sends_to_its_neighbour_only(n, n_stages):
    messages = sent(rotated(n, n_stages=n_stages).lower(4))
    assert {(source, target) for *_, source, target in messages} == {
        (rank, (rank + 1) % n) for rank in range(n)
    }


@pytest.mark.parametrize(("n", "n_stages"), SOME)
@pytest.mark.parametrize("delay", [1, 2])
def test_stage_0_begins_where_it_does_in_order(n, n_stages, delay):
    programs = [
        catalog.cyclic(n, delay, n_stages=n_stages, chains=chains).lower(5)
        for chains in ("in_order", "rotated")
    ]
    # The last versions may go through ranks that no longer read them.
    in_order, around = ([m for m in sent(p, 0) if m[2] < 3] for p in programs)
    assert in_order == around


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


AS_MADE = "stage {} on micro-batch {} .* {} steps late.* delay={}"


@pytest.mark.parametrize("n", SIZES)
def test_refuses_weights_that_are_as_fresh_as_can_be(n):
    with pytest.raises(UserError, match=AS_MADE.format(0, n - 1, 0, 1)) as refusal:
        rotated(n, "freshest")
    assert f"[0F{n - 1}]" in str(refusal.value)


@pytest.mark.parametrize(
    ("delay", "place"),
    [
        ([[1, 1, 1], [1, 1, 1], [0, 1, 1]], (2, 0, 0, 1)),
        ([[1, 1, 1], [1, 0, 1], [1, 1, 1]], (1, 1, 0, 1)),
    ],
)
def test_refuses_one_entry_without_time(delay, place):
    with pytest.raises(UserError, match=AS_MADE.format(*place)):
        rotated(3, delay)


def test_takes_entries_that_are_fresh_and_leave_time():
    assert rotated(3, [[1, 1, 1], [1, 1, 0], [1, 0, 0]]).lower(4).verify()


def test_takes_time_that_is_less_than_a_slot():
    """Rank 0 reads stage 0 four sevenths of a slot after it is made."""
    program = rotated(7, n_stages=2).lower(4).verify()
    assert (52, "weights", 1, 6, 0) in sent(program, 0)
    read = next(i for i in program.ranks[0] if (i.stage, i.version) == (0, 1) and i.action.computes)
    assert (read.tick, program.schedule.timing.ticks_per_slot) == (56, 7)


@pytest.mark.parametrize("delay", [0, 1])
def test_refuses_an_all_reduce(delay):
    when = timing.simultaneous(3, 3)
    with pytest.raises(UserError, match=r"stage 0 .*in_order"):
        Schedule("own", 3, 3, when, "per_microbatch", delay, chains="rotated")


@pytest.mark.parametrize("placement", ["one", "per_stage", "per_stage_and_microbatch"])
def test_refuses_other_placements(placement):
    with pytest.raises(UserError, match=f"'{placement}'"):
        catalog.cyclic(3, 1, placement, chains="rotated")


def test_refuses_sharded_state():
    with pytest.raises(UserError, match="sharded"):
        catalog.cyclic(3, 1, state="sharded", chains="rotated")


@pytest.mark.parametrize("chains", ["", "Rotated", None, True])
def test_refuses_unknown_chains(chains):
    with pytest.raises(UserError, match=f"chains {chains!r}"):
        catalog.cyclic(3, 1, chains=chains)


def test_one_rank_has_nothing_to_hand_on():
    assert rotated(1).lower(3).ranks == catalog.cyclic(1, 1).lower(3).ranks

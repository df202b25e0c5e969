"""Chains of gradients: who sends what to whom, when, and what a schedule must leave time for."""

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import chain, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schedule.strategies import matrices, quick, random_delays, schedules, shifted
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.schedule import (
    Action,
    Buffer,
    RandomDelay,
    Schedule,
    catalog,
    steady_state,
    timing,
)
from toolkit.schedule.steady_state import footprint

SIZES = more((2, 3, 4, 5, 8, 13, 16), range(2, 17))


def rotated(n, delay=1, **sizes):
    return catalog.cyclic(n, delay, chains="rotated", **sizes)


def hops(program, stage, buffer, of):
    """(tick, from, to) of the messages of a step's gradient, or of a version of the weights."""
    return sorted(
        (i.tick, rank, *i.peers)
        for rank, instructions in enumerate(program.ranks)
        for i in instructions
        if (i.action, i.stage, i.buffer, i.of_step) == (Action.SEND, stage, buffer, of)
    )


# Backwards of stage 0 end at 6, 8 and 10, of stage 1 at 5, 7, 9, of stage 2 at 4, 6, 8; the new
# weights of stage j are read from 12 + j, 14 + j and 16 + j. Two hops of the gradient, then two
# of the weights.
ROTATED = [
    ([(6, 0, 1), (8, 1, 2)], [(11, 2, 0), (13, 0, 1)]),
    ([(7, 1, 2), (9, 2, 0)], [(14, 0, 1), (16, 1, 2)]),
    ([(8, 0, 1), (8, 2, 0)], [(13, 1, 2), (13, 2, 0)]),
]


def test_chains_of_three_ranks():
    program = rotated(3).lower(4)
    for j, (gradient, weights) in enumerate(ROTATED):
        assert hops(program, j, Buffer.GRADIENT, 0) == gradient
        assert hops(program, j, Buffer.WEIGHTS, 1) == weights


def test_a_ring_is_in_the_order_in_which_ranks_finish():
    """Micro-batch 1 starts first, then 2, then 0."""
    when = shifted(3, (4, 0, 2), 6)
    schedule = Schedule("own", 3, 3, when, "per_microbatch", 2, chains="rotated")
    assert schedule.rings == (
        ((1,), (2,), (0,)),
        ((2,), (0,), (1,)),
        ((0,), (1,), (2,)),
    )
    assert schedule.owners == (0, 1, 2)
    # Rank 0 starts first, and is the last to have run both its micro-batches, 0 and 2.
    when = shifted(1, (0, 2, 8, 6), 10)
    options = {"delay": 1, "chains": "rotated", "accumulate": 2}
    assert Schedule("own", 1, 4, when, "per_microbatch", **options).rings == (
        ((1,), (0,)),
    )


@pytest.mark.parametrize("chains", ["in_order", "rotated"])
def test_weights_do_not_wait_once_they_have_been_used(chains):
    """Rank 0 reads stage 0 in slot 24, and rank 1 in slot 28."""
    program = catalog.cyclic(3, 1, n_stages=6, chains=chains).lower(4)
    assert hops(program, 0, Buffer.WEIGHTS, 1) == [(23, 2, 0), (25, 0, 1)]


@pytest.mark.parametrize(
    ("n", "n_stages", "k"),
    [
        *((n, n, 1) for n in SIZES),
        (2, 4, 1),
        (5, 15, 1),
        (2, 2, 2),
        (3, 6, 3),
        (4, 4, 2),
    ],
)
def test_every_rank_does_as_much_as_any_other(n, n_stages, k):
    """Of each stage it hands on a gradient and weights, except of one in n stages."""
    schedule = rotated(n, n_stages=n_stages, accumulate=k)
    program = schedule.lower(5).verify()
    assert schedule.owners == tuple((j - 1) % n for j in range(n_stages))
    each = 2 * (n - 1) * (n_stages // n)
    for slots in zip(*steady_state(schedule).traffic, strict=True):
        assert (
            sum(slot.messages for slot in slots)
            == sum(slot.units for slot in slots)
            == each
        )
    sends = [(rank, i) for rank, own in enumerate(program.ranks) for i in own]
    ways = {(rank, *i.peers) for rank, i in sends if i.action == Action.SEND}
    assert ways == {(rank, (rank + 1) % n) for rank in range(n)}


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("delay", [1, 2])
def test_weights_go_on_as_late_as_all_later_ranks_allow(n, delay):
    """A slot before the first of them reads."""
    schedule = rotated(n, delay)
    reads, came = {}, {}
    for rank, instructions in enumerate(schedule.lower(delay + 2).ranks):
        for i in instructions:
            if i.version == 1 and i.action == Action.FORWARD:
                reads[i.stage, rank] = i.tick
            elif i.version == 1 and i.action == Action.RECV:
                came[i.stage, rank] = i.tick
    assert len(came) == n * (n - 1)
    for j, groups in enumerate(schedule.rings):
        ring = [*chain.from_iterable(groups)]
        assert ring == [(j + k) % n for k in range(n)]
        for k, rank in enumerate(ring[:-1]):
            assert came[j, rank] == min(reads[j, other] for other in ring[k:-1]) - 1


@pytest.mark.parametrize("n", SIZES)
def test_footprint(n):
    """Fewer weights, as no rank makes every version; and messages that bunch."""
    in_order = footprint(catalog.cyclic(n, 1))
    weights, slot = 2 - Fraction(n > 2, n), Fraction(2 if n > 2 else 1, n)
    expected = replace(in_order, weights=weights, traffic_in_slot=slot, rounds=n - 1)
    assert footprint(rotated(n)) == expected


def read_by(i):
    """The weights that an instruction computes with or predicts from."""
    return i.reads if i.action.computes or i.action == Action.PREDICT else ()


@given(
    schedules(
        placements=["per_microbatch"], states=["replicated"], chains=["in_order"]
    ),
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
        {
            max(schedule.timing.gradient_end(j, i) for i in range(w, m, n))
            for w in range(n)
        }
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
                assert (
                    rank == schedule.owners[i.stage] == schedule.rings[i.stage][-1][-1]
                )
    for (j, version), found in hops.items():
        *others, together = schedule.rings[j]
        expected = []
        for way in ([*chain.from_iterable(others)], together[:-1]):
            reads = [
                any((j, version) in read_by(i) for i in program.ranks[r]) for r in way
            ]
            reached = way[
                : max((k for k, read in enumerate(reads, 1) if read), default=0)
            ]
            expected += pairwise([schedule.owners[j], *reached])
        assert Counter(found) == Counter(expected)


TIGHT = shifted(1, (0, 2), 4)  # the update ends at tick 4, when the next step starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delay": "freshest"}, r"(?s)stage 0 on micro-batch 2 .* 0 steps late.*delay=1.*\[0F2\]"),
        ({"delay": [[1, 1, 1], [1, 1, 1], [0, 1, 1]]}, "stage 2 on micro-batch 0 .*delay=1"),
        ({"delay": [[1, 1, 1], [1, 0, 1], [1, 1, 1]]}, "stage 1 on micro-batch 1 .*delay=1"),
        ({"placement": "per_stage"}, "'per_stage'"),
        ({"placement": "one"}, "'one'"),
        ({"state": "sharded"}, "sharded"),
        ({"timing": timing.simultaneous(3, 3)}, "stage 0 .*in_order"),
        ({"n_stages": 1, "n_microbatches": 2, "timing": TIGHT, "delay": RandomDelay(most=2)},
         "on micro-batch 0 reads them as they are made, 0 steps"),
        ({"chains": "Rotated"}, "chains 'Rotated'"),
        ({"chains": None}, "chains None"),
    ],
    ids=str,
)  # fmt: skip
def test_refuses(options, message):
    usual = {
        "n_stages": 3,
        "n_microbatches": 3,
        "timing": timing.cyclic(3, 3),
        "delay": 1,
    }
    usual |= {"placement": "per_microbatch", "chains": "rotated"}
    with pytest.raises(UserError, match=message):
        Schedule("own", **usual | options)


def test_takes_entries_that_are_fresh_and_leave_time():
    assert rotated(3, [[1, 1, 1], [1, 1, 0], [1, 0, 0]]).lower(4).verify()
    late = RandomDelay(least=1, most=2)
    Schedule("own", 1, 2, TIGHT, "per_microbatch", late, chains="rotated").lower(
        6
    ).verify()

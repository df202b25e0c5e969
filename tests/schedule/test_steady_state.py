"""The steady state: activations and traffic against the closed forms, N = 2 .. 16.

Activations in stage-activations (Psi_A / N), traffic in stage-parameters (Psi_P / N). A message
counts in the slot at whose beginning it is sent.
"""

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import product

import pytest
from hypothesis import given

from tests.schedule.strategies import quick, schedules
from tests.thorough import more
from toolkit.errors import UserError
from toolkit.schedule import (
    Action,
    Buffer,
    Instruction,
    Kind,
    Op,
    Schedule,
    Timing,
    catalog,
    steady_state,
)
from toolkit.schedule.paper_table import RULES as PAPERS_RULES
from toolkit.schedule.paper_table import SETTINGS, compare
from toolkit.schedule.steady_state import (
    Footprint,
    footprint,
    settled_steps,
    steady_slots,
    steady_steps,
    steps_to_time,
)
from toolkit.schedule.traffic import received_of, traffic_of

RULES = [1, "freshest"]
DP = 0  # the rules by their delay
every_n = pytest.mark.parametrize("n", more((2, 3, 4, 5, 8, 13, 16), range(2, 17)))
every_rule = pytest.mark.parametrize("delay", RULES)


@cache
def schedule(rule, n, state="replicated"):
    if rule == DP:
        return catalog.data_parallel(n, state=state)
    return catalog.cyclic(n, rule, state=state)


@cache
def program(*choices):
    return schedule(*choices).lower(4).verify()


@cache
def steady(*choices):
    return steady_state(schedule(*choices))


def sent(buffer, *choices):
    """(rank, slot) -> targets of the messages sent then."""
    targets = defaultdict(list)
    lowered = program(*choices)
    for rank, instructions in enumerate(lowered.ranks):
        for i in instructions:
            if i.action == Action.SEND and i.buffer == buffer:
                targets[rank, lowered.slot(i)] += i.peers
    return targets


@every_n
@every_rule
def test_stage_j_of_a_pipeline_holds_n_minus_j_activations(n, delay):
    lowered = catalog.cyclic(n, delay, "per_stage").lower(4).verify()
    assert lowered.peak_activations() == tuple(n - j for j in range(n))


@every_n
def test_dp_traffic_is_all_as_the_backwards_end(n):
    """Stage j's backward runs in slot 2N-1-j, so its all-reduce begins slot 2N-j."""
    ends = {(2 * n - j) % (2 * n) for j in range(n)}
    for slot, traffic in enumerate(steady(DP, n).traffic):
        each = 2 * (n - 1) if slot in ends else 0
        assert {(t.messages, t.units * n) for t in traffic} == {(each, each)}


@every_n
@every_rule
def test_cdp_traffic_is_spread_over_the_step(n, delay):
    found = steady(delay, n)
    units = found.units_by_slot
    assert all(abs(sent - sum(units) / len(units)) <= 1 for sent in units)
    assert max(t.messages for slot in found.traffic for t in slot) <= 2


@every_n
def test_sums_go_to_the_next_rank_and_weights_round_a_ring(n):
    """One message of each kind in a slot. In v2 the last rank updates, and sends stage j to rank
    N-1-j, the first that reads it; the ring is of the others.
    """
    for delay in RULES:
        for (rank, _), targets in sent(Buffer.GRADIENT, delay, n).items():
            assert targets == [rank + 1]
    for (rank, _), targets in sent(Buffer.WEIGHTS, 1, n).items():
        assert targets == [(rank + 1) % n]
    for (rank, _), targets in sent(Buffer.WEIGHTS, "freshest", n).items():
        assert len(targets) == 1
        assert rank == n - 1 or targets == [(rank + 1) % (n - 1)]
    firsts = {
        i.stage: i.peers
        for i in program("freshest", n).ranks[-1]
        if i.action == Action.SEND and i.buffer == Buffer.WEIGHTS
    }
    assert firsts == {j: (n - 1 - j,) if j else (0,) for j in range(n)}


@every_n
def test_sharded_cdp_is_point_to_point_and_holds_few_weights(n):
    """One stage owned, and the few that pass through; replicated, every stage is held."""
    for delay, state in product((DP, *RULES), ("replicated", "sharded")):
        held = max(program(delay, n, state).peak_weights())
        if delay == DP:
            assert held == (n + 1 if state == "replicated" else 3)
        elif state == "replicated":
            assert held > n
        else:
            assert held <= 4
            actions = {
                i.action for rank in program(delay, n, state).ranks for i in rank
            }
            assert actions.isdisjoint(
                {Action.BROADCAST, Action.REDUCE, Action.ALL_REDUCE}
            )
            assert (
                max(
                    t.messages for slot in steady(delay, n, state).traffic for t in slot
                )
                <= 3
            )


@given(schedules())
@quick
def test_activations_of_all_ranks_are_those_alive_at_one_moment(schedule):
    """By the ops' own times: from a forward's start to the end of its stage's backward. More steps
    than the steady state lowers change nothing.
    """
    timing, settled = schedule.timing, settled_steps(schedule)
    alive = [
        (timing.starts[Op(Kind.FORWARD, j, m)] + at, timing.gradient_end(j, m) + at)
        for at in range(0, (2 * settled + 1) * timing.period, timing.period)
        for j, m in product(range(schedule.n_stages), range(schedule.n_microbatches))
    ]
    first = settled * timing.period
    held = [
        sum(begin <= tick < end for begin, end in alive)
        for tick in range(first, first + timing.period)
    ]
    tick, found = timing.ticks_per_slot, steady_state(schedule)
    expected = [max(held[at : at + tick]) for at in range(0, timing.period, tick)]
    assert list(found.total_activations) == expected
    together = zip(found.activations, found.total_activations, strict=True)
    assert all(max(ranks) <= total <= sum(ranks) for ranks, total in together)
    longer, slots = schedule.lower(2 * settled + 3), steady_slots(schedule, settled)
    assert found.activations == tuple(zip(*longer.activations(), strict=True))[slots]
    assert found.total_activations == longer.total_activations()[slots]
    assert found.traffic == longer.traffic()[slots]


@pytest.mark.parametrize(
    ("period", "ticks", "steps"), [(13, 2, 2), (23, 4, 4), (17, 3, 3), (1, 2, 2)]
)
def test_a_period_that_ends_within_a_slot(period, ticks, steps):
    """The steady state has periods until one ends with a slot."""
    starts = {Op(Kind.FORWARD, 0, 0): 0, Op(Kind.BACKWARD, 0, 0): ticks}
    own = Schedule("own", 1, 1, Timing(starts, period, ticks), "one", "freshest")
    found = steady_state(own)
    assert len(found.total_activations) * ticks == steps * period
    under_way = -(-2 * ticks // period)
    assert found.peak_activations in (under_way, under_way + 1)
    assert footprint(own).total_activations == found.peak_activations


def test_steady_steps_are_whole_rounds_between_start_and_end():
    """CDP-v1: a step and a half long, weights a step late, so two threads in turn."""
    cdp, dp = schedule(1, 4), schedule(DP, 4)
    assert (settled_steps(cdp), settled_steps(dp)) == (4, 2)
    found = {n: steady_steps(cdp, n) for n in (2, 3, 7, 8, 9, 10)}
    assert {n: (steps.start, steps.stop) for n, steps in found.items()} == {
        2: (1, 1), 3: (1, 2), 7: (1, 6), 8: (5, 7), 9: (5, 7), 10: (5, 9)
    }  # fmt: skip
    assert steady_steps(dp, 5) == range(3, 5)
    assert (steps_to_time(cdp), steps_to_time(dp)) == (10, 7)
    assert (steps_to_time(cdp, 1), steps_to_time(cdp, 3)) == (8, 10)


@given(schedules())
@quick
def test_enough_steps_are_steady(schedule):
    n_steps = steps_to_time(schedule)
    steady = steady_steps(schedule, n_steps)
    assert len(steady) >= 4
    assert steady.stop <= n_steps
    assert steady.start == settled_steps(schedule) + 1
    fewer = steady_steps(schedule, n_steps - 1)
    assert fewer.start == 1 or len(fewer) < len(steady)


HALF, THIRD = Fraction(1, 2), Fraction(1, 3)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 2 all-reduces of half a model; each sends 2(n-1)/n = 1 time what it reduces.
        (catalog.data_parallel(2), Footprint(2, 1, 2, 1, 1 + HALF, 1, 4, HALF, 2)),
        # Each stage: one sum to the owner, one version back. Two versions of a stage are alive.
        (catalog.cyclic(2), Footprint(2, 1, 1 + HALF, 1, 1 + HALF, 1, 2, HALF, 1)),
        # One stage a rank, and a second version of it while it is remade.
        (catalog.gpipe(2, 2), Footprint(2, 1, 2, HALF, 1, 0, 0, 0, 0)),
        # 1F1B of 3 stages and many micro-batches: 3 + 2 + 1 stage-activations.
        (catalog.one_f_one_b(3, 9), Footprint(3, 1, 2, THIRD, 2 * THIRD, 0, 0, 0, 0)),
        # Every stage lives where it is owned.
        (
            catalog.data_parallel(2, state="sharded"),
            Footprint(2, 1, 2, HALF, 1 + HALF, Fraction(5, 4), Fraction(5, 2), 1, 2),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_footprints_by_hand(schedule, expected):
    assert footprint(schedule) == expected


def test_messages_that_wait_for_each_other_are_counted_in_a_row():
    """Ranks 0 to 2 end together and rank 3 later: the sum goes from hand to hand at once."""
    orders = ["0F0 0B0", "0F1 0B1", "0F2 0B2", "0F3 0F4 0B3 0B4"]
    assert footprint(Schedule.from_rank_orders(orders)).rounds == 3


def collective(action, peers):
    """Messages and units that each rank sends and receives."""
    i = Instruction(0, action, 0, buffer=Buffer.GRADIENT, peers=peers)
    return [[of(i, rank) for rank in peers] for of in (traffic_of, received_of)]


@pytest.mark.parametrize("n", range(2, 18))
@pytest.mark.parametrize("action", [Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST])
def test_collectives_send_what_they_receive(action, n):
    totals = [
        (sum(found.messages for found in total), sum(found.units for found in total))
        for total in collective(action, tuple(range(n)))
    ]
    all_reduce = action == Action.ALL_REDUCE
    assert (
        totals == [(2 * (n - 1) * n, 2 * (n - 1)) if all_reduce else (n - 1, n - 1)] * 2
    )


def test_the_root_of_a_tree():
    """A root of four ranks sends to two, and one of these to the fourth; a reduction reversed."""
    for action in (Action.BROADCAST, Action.REDUCE):
        outward, inward = [2, 1, 0, 0], [0, 1, 1, 1]
        expected = (
            [outward, inward] if action == Action.BROADCAST else [inward, outward]
        )
        found = collective(action, (2, 0, 1, 3))
        assert [[each.messages for each in total] for total in found] == expected


# The paper's table


@pytest.mark.parametrize("n", more((2, 3, 4, 5, 8), range(2, 17)))
def test_every_program_keeps_to_its_closed_form(n):
    rows = compare(n)
    assert [(row.setting, row.rule) for row in rows] == [
        (s, r) for s in SETTINGS for r in PAPERS_RULES
    ]
    assert {
        (row.setting, row.rule): row.differences for row in rows if row.differences
    } == {}


@pytest.mark.parametrize(
    ("setting", "dp", "cdp"),
    [
        ("one device", (1, 4, 4), (1, 2.5, 2.5)),
        ("multi-device", (4, 1, 4), (4, 1, 2.5)),
        ("with model parallelism", (16, 0.25, 4), (10, 0.25, 2.5)),
        ("pipeline", (4, 1, 4), (4, 1, 2.5)),
        ("ZeRO", (4, 1, 4), (4, 1, 2.5)),
    ],
)
def test_the_papers_table_for_four_workers(setting, dp, cdp):
    """Ranks, activations of one and of all."""
    rows = {row.rule: row.counted for row in compare(4) if row.setting == setting}
    found = {
        rule: (f.ranks, f.activations, f.total_activations) for rule, f in rows.items()
    }
    assert found == {"DP": dp, "CDP-v1": cdp, "CDP-v2": cdp}


def test_a_broken_formula_or_another_count_is_seen():
    row = compare(3)[4]
    for quantity, right in row.formula.items():
        broken = replace(row, formula=row.formula | {quantity: right + Fraction(1, 7)})
        assert broken.differences == {quantity: (right + Fraction(1, 7), right)}
        counted = replace(row.counted, **{quantity: 99})
        assert replace(row, counted=counted).differences == {quantity: (right, 99)}


@pytest.mark.parametrize("n", [1, 2.0])
def test_fewer_than_two_workers_are_refused(n):
    with pytest.raises(UserError, match=f"2 or more.*{n!r}"):
        compare(n)

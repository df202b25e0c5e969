"""Pipeline orders equal torch.distributed.pipelining's, and keep their papers' closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.schedule import (
    STATES,
    Kind,
    Op,
    RandomDelay,
    Schedule,
    catalog,
    pipeline_orders,
)
from toolkit.schedule.dependencies import dependencies

SIZES = [(p, m) for p in range(1, 7) for m in range(1, 13)]
LARGE = [(p, m) for p in range(1, 9) for m in (*range(p, 12), 16, 20)]


def text(rank_orders):
    return [" ".join(map(str, order)) for order in rank_orders]


def torchs(schedule_class, method, n_ranks, **attributes):
    """The orders that torch's own code gives, without the process groups of its constructors."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    made = getattr(schedules, schedule_class, None)
    if not hasattr(made, method):
        pytest.skip(f"this torch has no {schedule_class}.{method}")
    schedule = made.__new__(made)
    vars(schedule).update(attributes)
    found = getattr(schedule, method)
    rows = found() if method == "_get_pipeline_order" else [*map(found, range(n_ranks))]
    ops = ([action for action in rows[rank] if action] for rank in range(n_ranks))
    computes = ("F", "B", "I", "W", "OVERLAP_F_B")
    return text([a for a in row if a.computation_type.value in computes] for row in ops)


def torchs_rounds(schedule_class, n_ranks, per_rank, n_microbatches):
    rounds = max(1, n_microbatches // n_ranks)
    return torchs(
        schedule_class,
        "_calculate_single_rank_operations",
        n_ranks,
        pp_group_size=n_ranks,
        n_local_stages=per_rank,
        number_of_rounds=rounds,
        microbatches_per_round=n_microbatches // rounds,
        _n_microbatches=n_microbatches,
    )


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_orders_are_torchs(p, m):
    golden = torchs(
        "ScheduleGPipe", "_get_pipeline_order", p, _num_stages=p, _n_microbatches=m
    )
    assert text(pipeline_orders.gpipe(p, m)) == golden
    golden = torchs_rounds("ScheduleInterleavedZeroBubble", p, 1, m)
    assert text(pipeline_orders.zero_bubble(p, m)) == golden
    for per_rank in (2, 3) if m % max(1, m // p) == 0 else ():
        golden = torchs_rounds("ScheduleInterleaved1F1B", p, per_rank, m)
        assert text(pipeline_orders.interleaved_1f1b(p * per_rank, m, p)) == golden
    for per_rank in (1, 2, 3):
        method, stages = "_calculate_single_rank_operations", [None] * per_rank
        sizes = {"pp_group_size": p, "_stages": stages, "_n_microbatches": m}
        golden = torchs("ScheduleLoopedBFS", method, p, **sizes)
        assert text(pipeline_orders.looped_bfs(p * per_rank, m, p)) == golden


def test_1f1b_of_four_stages():
    assert text(pipeline_orders.one_f_one_b(4, 6)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5",
    ]


@pytest.mark.parametrize(("p", "m"), LARGE)
def test_periods_and_activations(p, m):
    """A step ends where the next can start: the bubble is (p-1) slots a kind of op, or (p-1).

    GPipe holds every micro-batch, 1F1B those in flight, ZB-H1 no more than 1F1B's first.
    """
    made = gpipe, plain, zero = [
        make(p, m) for make in (catalog.gpipe, catalog.one_f_one_b, catalog.zero_bubble)
    ]
    periods = [2 * (m + p - 1), 2 * (m + p - 1), 3 * m + p - 1]
    assert [schedule.period for schedule in made] == periods
    assert [max(map(one.timing.end, one.timing.starts)) for one in made] == periods
    assert gpipe.lower(2).peak_activations() == (m,) * p
    assert plain.lower(2).peak_activations() == tuple(min(m, p - r) for r in range(p))
    assert max(zero.lower(2).peak_activations()) <= p


@pytest.mark.parametrize(("p", "m"), [*SIZES, (8, 15), (8, 32)])
def test_eager_looped_and_without_bubble(p, m):
    """Closed forms, for v stages a rank; the last two hold what their first forwards make."""
    eager, zero = catalog.eager_1f1b(p, m), catalog.zb_h2(p, m)
    assert eager.period == catalog.one_f_one_b(p, m).period
    assert eager.lower(2).peak_activations() == tuple(
        min(m, 2 * (p - r) - 1) for r in range(p)
    )
    assert zero.period == 3 * m + max(0, 2 * p - 1 - m)
    assert set(zero.lower(2).peak_activations()) == {min(m, 2 * p - 1)}
    for v in (1, 2, 3):
        looped = catalog.looped_bfs(v * p, m, p)
        assert looped.lower(2).peak_activations() == (v * m,) * p
        if m >= p:
            assert looped.period == 2 * (v * m + p - 1)


@pytest.mark.parametrize("p", range(2, 9))
def test_zb_h2_is_never_slower_than_zb_h1(p):
    """Neither its period, nor a step from its first op to its last one, nor beyond its memory."""
    for m in range(1, 21):
        one, two = catalog.zero_bubble(p, m), catalog.zb_h2(p, m)
        assert two.period == 3 * m + max(0, 2 * p - 1 - m) <= one.period
        assert steps_slots(two) <= steps_slots(one)
        assert max(two.lower(2).peak_activations()) <= min(m, 2 * p - 1)
        if m <= p:
            assert two.timing == one.timing


def steps_slots(schedule):
    """Slots from the first op of a training step to the end of its last one."""
    return max(map(schedule.timing.end, schedule.timing.starts))


def test_slots_of_zb_h2_with_few_microbatches():
    """The numbers of its docstring."""
    paper = [
        Schedule.from_rank_orders(pipeline_orders.zero_bubble(8, m, 7))
        for m in (8, 12, 15)
    ]
    assert [(x.period, steps_slots(x)) for x in paper] == [(31, 34), (39, 44), (45, 52)]
    here = [catalog.zb_h2(8, m) for m in (8, 12, 15)]
    assert [(x.period, steps_slots(x)) for x in here] == [(31, 31), (39, 43), (45, 52)]
    assert here[-1].timing == paper[-1].timing


def test_interleaving_shrinks_the_bubble():
    """v stages a rank divide it by v: p-1 slots of a stage before and after, for p ranks."""
    whole, halves = catalog.one_f_one_b(4, 8), catalog.interleaved_1f1b(8, 8, 4)
    assert whole.period - 2 * 8 == 6
    assert halves.period - 2 * 2 * 8 == 6  # slots half as long


@st.composite
def rank_orders(draw, max_size=5):
    """Any orders that can be carried out: one order of all ops, dealt out to ranks.

    Each stage has a rank, or each stage and micro-batch; each backward is whole or in halves.
    """
    s, m = draw(st.integers(1, max_size)), draw(st.integers(1, max_size))
    by_stage = draw(st.booleans())
    names = st.integers(0, draw(st.integers(0, s * m - 1)))
    ranks = {}
    for j in range(s):
        home = draw(names)
        ranks |= {(j, k): home if by_stage else draw(names) for k in range(m)}
    chains = []
    for k in range(m):
        chain = [Op(Kind.FORWARD, j, k) for j in range(s)]
        for j in reversed(range(s)):
            split = draw(st.booleans())
            chain.append(Op(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, j, k))
        for op in [op for op in chain if op.kind == Kind.BACKWARD_INPUT]:
            after = draw(st.integers(chain.index(op) + 1, len(chain)))
            chain.insert(after, op._replace(kind=Kind.BACKWARD_WEIGHT))
        chains.append(chain)
    found = {rank: [] for rank in sorted(set(ranks.values()))}
    while chains := [chain for chain in chains if chain]:
        op = draw(st.sampled_from(chains)).pop(0)
        found[ranks[op[1:]]].append(op)
    return [*found.values()]


@given(rank_orders(), st.sampled_from([0, 1, "freshest"]), st.sampled_from(STATES))
@quick
def test_any_orders_that_can_be_carried_out(rank_orders, delay, state):
    """The ranks keep their orders, no slot is given away, and the program is right."""
    schedule = Schedule.from_rank_orders(rank_orders, delay=delay, state=state)
    starts = schedule.timing.starts
    for order in rank_orders:
        assert order == sorted(order, key=starts.__getitem__)
    program = schedule.lower(3).verify()
    timeline = simulate(program, unit_costs(schedule.n_stages), UNIT)
    assert len(timeline.step_ends) == 3
    if not schedule.splits_backward:
        spans = [
            span for span in timeline.spans if span.lane == "compute" and span.step == 0
        ]
        found = {span.name: span.start for span in spans}
        assert found == {str(op): start for op, start in starts.items()}


@given(rank_orders(), st.integers(0, 12), st.sampled_from(STATES))
@quick
def test_any_orders_overlap_by_any_period(rank_orders, more, state):
    """No op waits longer than until its rank is free and what it needs has ended."""
    period = max(map(len, rank_orders)) + more
    schedule = Schedule.from_rank_orders(
        rank_orders, delay="freshest", state=state, period=period
    )
    timing = schedule.timing
    for order in rank_orders:
        taken, free = set(), 0
        for op in order:
            needs = dependencies(op, timing.starts, schedule.n_stages)
            slots = range(max([free, *map(timing.end, needs)]), timing.starts[op] + 1)
            assert [slot for slot in slots if slot % period not in taken] == [
                timing.starts[op]
            ]
            taken.add(timing.starts[op] % period)
            free = timing.end(op)
    schedule.lower(3).verify()


@pytest.mark.parametrize(
    ("period", "delays"),
    [
        (7, [0, [0, 0], RandomDelay(most=2)]),
        (6, [1, "freshest", [1, 0], RandomDelay(least=1)]),
    ],
)
def test_the_period_waits_for_the_weights(period, delays):
    """Rank 1 is busy for 6 slots; stage 0 begins at slot 0 and is updated after 0B1, at slot 7.

    slot   0   1   2   3   4   5   6
    rank 0 0F0 .   .   0B0
    rank 1 .   1F0 1B0 0F1 1F1 1B1 0B1
    """
    for delay in delays:
        orders = ["0F0 0B0", "1F0 1B0 0F1 1F1 1B1 0B1"]
        schedule = Schedule.from_rank_orders(orders, delay=delay)
        assert schedule.period == period
        schedule.lower(3).verify()


OVERLAP = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]


def test_steps_overlap_where_the_period_is_shorter_than_a_step():
    """Rank 0 runs the next step's forwards while it waits for its first backward.

    slot   0   1   2   3    4    5
    rank 0 0F0 0F1 .   0B0  0F0' 0F1' 0B1
    rank 1 .   1F0 1B0 1F1  1B1  1F0'
    """
    starts = {
        "0F0": 0,
        "0F1": 1,
        "0B0": 3,
        "0B1": 6,
        "1F0": 1,
        "1B0": 2,
        "1F1": 3,
        "1B1": 4,
    }
    schedule = Schedule.from_rank_orders(OVERLAP, period=4, delay="freshest")
    assert {str(op): start for op, start in schedule.timing.starts.items()} == starts
    assert (schedule.staleness, schedule.period) == (((1, 1), (0, 0)), 4)
    assert Schedule.from_rank_orders(OVERLAP, period=6) == Schedule.from_rank_orders(
        OVERLAP
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((6, 4, 4), "6 stages .* 4 ranks"),
        ((4, 5, 2), "5 micro-batches .* 2 equal rounds.* multiple of 2"),
    ],
)
def test_refuses_sizes_that_cannot_be_dealt_out(arguments, message):
    with pytest.raises(UserError, match=message):
        catalog.interleaved_1f1b(*arguments)


@pytest.mark.parametrize("period", [3, 0, 6.0, "6"])
def test_refuses_a_period(period):
    message = "rank 0 has 4 ops .* not 3" if period == 3 else f"period.*{period!r}"
    with pytest.raises(UserError, match=message):
        Schedule.from_rank_orders(OVERLAP, period=period)

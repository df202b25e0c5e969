"""V-shaped pipelines keep their papers' bounds on memory, and their bubbles' closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick
from tests.schedule.test_pipeline_orders import torchs
from tests.thorough import more
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, Schedule, catalog

MAKES = {"ZB-V": catalog.zb_v, "V-Half": catalog.v_half, "V-Min": catalog.v_min}
RANKS = range(1, 13)
SIZES = sorted(
    {(p, m) for p in RANKS for m in (*range(1, 10), p, 2 * p - 1, 2 * p, 3 * p + 1)}
)
every = pytest.mark.parametrize("name", MAKES)


def most(name, p):
    """Stage-activations that a rank may hold: two for each of the paper's micro-batches."""
    return 2 * {"ZB-V": p, "V-Half": (p + 2) // 2, "V-Min": (p + 4) // 3}[name]


def bubble(name, p, m):
    """Slots in which the busiest rank idles between its first and its last op."""
    k = most(name, p)
    return max(
        0, 2 * p - 1 - m, 6 * p - 1 - 3 * k if 2 * m > k else 4 * p - 1 - 4 * m
    ) * (p > 1)


HALF = """
rank 0 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
rank 1 .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 1I0 1W0 4I1 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2 .
rank 2 .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
"""
MIN = """
rank 0 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 0I0 5I1 0W0 5W1 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
rank 1 .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 1I0 1W0 .   4I1 4F2 4W1 1I1 4I2 1W1 4W2 1I2 1W2 .
rank 2 .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2 .
"""
# One micro-batch, with the backwards of the weights.
BLOCK = """
rank 0 0F0 .   .   .   .   .   .   7F0 7I0 7W0 .   .   .   .   .   0I0 0W0
rank 1 .   1F0 .   .   .   .   6F0 .   .   6I0 6W0 .   .   .   1I0 1W0 .
rank 2 .   .   2F0 .   .   5F0 .   .   .   .   5I0 5W0 .   2I0 2W0 .   .
rank 3 .   .   .   3F0 4F0 .   .   .   .   .   .   4I0 3I0 4W0 3W0 .   .
"""


@pytest.mark.parametrize(
    ("name", "sizes", "grid"),
    [("V-Half", (6, 3), HALF), ("V-Min", (6, 3), MIN), ("V-Min", (8, 1), BLOCK)],
)
def test_literal_grid(name, sizes, grid):
    assert MAKES[name](*sizes).grid().splitlines()[1:] == grid.strip().splitlines()


@pytest.mark.parametrize("p", more([4, 6], range(2, 13)))
def test_bubbles_are_no_larger_than_published(p):
    """Sail-sg's orders with enough micro-batches; those of few idle less: see :func:`bubble`."""
    if p % 2 == 0 and p >= 4:
        assert bubble("V-Half", p, 32) <= 3 * p - 7
    if p % 3 == 0:
        assert bubble("V-Min", p, 32) <= 4 * p - 7
    for name in ("V-Half", "V-Min"):
        for m in range(1, 33):
            starts = MAKES[name](2 * p, m).timing.starts
            spans = [
                [at for op, at in starts.items() if op.stage in (r, 2 * p - 1 - r)]
                for r in range(p)
            ]
            assert max(max(span) - min(span) + 1 - 6 * m for span in spans) == bubble(
                name, p, m
            )


@every
@given(p=st.integers(1, 9), m=st.integers(1, 24))
@quick
def test_any_sizes(name, p, m):
    """Every op once, on its arm of the V, in the order of the micro-batches; a right program."""
    schedule = MAKES[name](2 * p, m)
    assert (schedule.n_ranks, schedule.n_stages, schedule.n_microbatches) == (
        p,
        2 * p,
        m,
    )
    starts = schedule.timing.starts
    assert len(starts) == 6 * p * m
    for j in range(2 * p):
        assert schedule.rank(j, 0) == min(j, 2 * p - 1 - j)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            slots = [starts[Op(kind, j, k)] for k in range(m)]
            assert slots == sorted(slots)
    program = schedule.lower(2).verify()
    assert max(program.peak_activations()) == min(2 * m, most(name, p))


@every
@pytest.mark.parametrize("p", RANKS)
def test_bubble_and_memory(name, p):
    """All ranks hold the bound."""
    for m in (m for q, m in SIZES if q == p):
        assert MAKES[name](2 * p, m).period == 6 * m + bubble(name, p, m)
    peaks = MAKES[name](2 * p, 2 * p).lower(1).peak_activations()
    assert set(peaks) == {most(name, p)}


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zb_v_against_torchs(p, m):
    """As full and as dense where torch's pattern is; with fewer micro-batches no longer."""
    method = "_calculate_single_rank_operations"
    sizes = {"pp_group_size": p, "num_stages": 2 * p, "_n_microbatches": m}
    theirs = Schedule.from_rank_orders(
        torchs("ScheduleZBVZeroBubble", method, p, **sizes)
    )
    own = catalog.zb_v(2 * p, m)
    assert own.layout == theirs.layout
    assert own.period <= theirs.period
    if m >= 2 * p - 1:
        assert own.period == theirs.period == 6 * m
        assert own.lower(1).peak_activations() == theirs.lower(1).peak_activations()


# Of the authors' code, in slots, by ranks; 1F1B's first rank idles for 6(p-1).
WHOLE = {1: 0, 2: 4, 3: 8, 4: 15, 5: 18, 6: 22, 7: 30, 8: 33, 9: 36}


@pytest.mark.parametrize(("p", "bubble"), WHOLE.items())
def test_1f1b_v_holds_and_idles_as_its_authors(p, bubble):
    """A backward takes two slots, its stage a forward's time each."""
    for m in (p, 2 * p, 3 * p):
        program = catalog.one_f_one_b_v(2 * p, m).lower(2).verify()
        assert max(program.peak_activations()) == min(2 * m, 2 * (2 * p // 3 + 1))
        one_step = catalog.one_f_one_b_v(2 * p, m).lower(1)
        timeline = simulate(one_step, unit_costs(2 * p, backward=2.0), UNIT)
        spans = [
            [s for s in timeline.spans if (s.rank, s.lane) == (r, "compute")]
            for r in range(p)
        ]
        busy = [
            max(s.end for s in of_rank) - min(s.start for s in of_rank)
            for of_rank in spans
        ]
        assert max(busy) - 6 * m == bubble


@given(p=st.integers(1, 5), waves=st.integers(1, 3), m=st.integers(1, 12))
@quick
def test_hanayo(p, waves, m):
    """Ranks idle 2(p-1) slots if p divides m, for any number of waves; p micro-batches at once."""
    schedule = catalog.hanayo(2 * waves * p, m, p)
    assert [schedule.rank(j, 0) for j in range(2 * p)] == [
        *range(p),
        *reversed(range(p)),
    ]
    assert max(schedule.lower(2).verify().peak_activations()) == 2 * waves * min(m, p)
    if m % p == 0:
        assert schedule.period == 4 * waves * m + 2 * (p - 1)


def test_hanayo_takes_whole_waves():
    with pytest.raises(UserError, match="make 6 stages a multiple of 4"):
        catalog.hanayo(6, 2, 2)


@pytest.mark.parametrize("name", [*MAKES, "1F1B-V"])
@pytest.mark.parametrize("n_stages", [1, 5])
def test_odd_stages_are_refused(name, n_stages):
    make = MAKES.get(name, catalog.one_f_one_b_v)
    with pytest.raises(UserError, match=f"make {n_stages} stages even"):
        make(n_stages, 4)

"""Pipelines in two directions keep their papers' closed forms."""

from dataclasses import replace

import pytest

from tests.schedule.test_pipeline_orders import torchs
from toolkit.cost import UNIT, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Schedule, catalog
from toolkit.schedule.steady_state import steps_to_time

CHIMERA = """
rank 0 0F0 0F2 .   3F1 3B1 3F3 3B3 0B0 .   0B2
rank 1 .   1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2 .
rank 2 .   1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3 .
rank 3 0F1 0F3 .   3F0 3B0 3F2 3B2 0B1 .   0B3
"""
SIZES = [(p, rounds * p) for p in (2, 4, 6, 8) for rounds in (1, 2, 3)]


def test_chimera_of_four_stages():
    assert catalog.chimera(4, 4).grid().splitlines()[1:] == CHIMERA.strip().splitlines()


@pytest.mark.parametrize(("p", "slots"), [(4, 10), (8, 22)])
def test_slots_of_chimera_are_those_of_its_paper(p, slots):
    assert catalog.chimera(p, p).period == slots


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_and_memory_of_chimera(p, m):
    schedule = catalog.chimera(p, m)
    assert schedule.period == 2 * m + p - 2
    program = schedule.lower(steps_to_time(schedule)).verify()
    outer = [p // 2 + 1 + rank for rank in range(p // 2)]
    assert program.peak_activations() == (*outer, *reversed(outer))
    if m == p:  # a backward takes twice its forward; the paper's share
        idle = simulate(program, unit_costs(p, backward=2.0), UNIT).idle_share
        assert idle == pytest.approx((p - 2) / (1.5 * m + p - 2))


@pytest.mark.parametrize(("p", "m"), [*SIZES, (4, 1), (4, 3), (4, 6), (6, 4)])
def test_each_stage_has_a_rank_in_each_direction(p, m):
    """Together they sum its gradient."""
    schedule = catalog.chimera(p, m)
    for j in range(p):
        assert {*schedule.layout.ranks(j)} == {j, p - 1 - j} if m > 1 else {j}
    program = schedule.lower(3).verify()
    sums = [
        i for of_rank in program.ranks for i in of_rank if i.buffer == Buffer.GRADIENT
    ]
    assert len(sums) >= 3 * p * (m > 1)
    updates = [
        i for of_rank in program.ranks for i in of_rank if i.action == Action.UPDATE
    ]
    assert {i.stage for i in updates} == {*range(p)}


@pytest.mark.parametrize("p", [1, 3])
def test_odd_stages_are_refused(p):
    with pytest.raises(UserError, match=f"make {p} stages even"):
        catalog.chimera(p, 4)


def test_orders_go_to_csv_and_back():
    schedule = catalog.chimera(4, 4)
    back = Schedule.from_csv(schedule.to_csv(), name="Chimera")
    assert back == schedule


DUAL = """
rank 0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3;3B1 3F2;0B0 3B2     3F3;0B1 3B3 0I2 0W2 0I3 0W3
rank 1 .   1F0 2F0 1F1 2F1 1F2 2B0 2F2;1B0 1F3;2B1 2F3;1B1 2B2     1B2 2I3 1I3 2W3 1W3
"""
DUAL_SIZES = [(p, m) for p in (2, 4, 6, 8) for m in (p, p + 1, 2 * p)]


def test_dualpipe_v_of_four_stages():
    assert catalog.dualpipe_v(4, 4).grid().splitlines()[1:] == DUAL.strip().splitlines()


@pytest.mark.parametrize(("s", "m"), DUAL_SIZES)
def test_dualpipe_v_is_torchs(s, m):
    found = torchs(
        "ScheduleDualPipeV",
        "_calculate_single_rank_operations",
        s // 2,
        pp_group_size=s // 2,
        _n_microbatches=m,
    )
    theirs, own = (
        Schedule.from_rank_orders(found, name="DualPipeV"),
        catalog.dualpipe_v(s, m),
    )
    assert own == theirs
    assert own.timing.pairs == theirs.timing.pairs


@pytest.mark.parametrize(("p", "m"), DUAL_SIZES)
@pytest.mark.parametrize("overlap", [1.0, 0.8, 2 / 3])
def test_bubble_and_memory_of_dualpipe(p, m, overlap):
    """The authors' table, where PP is p: B = 2 F, W = F, and F&B = 3 ``overlap`` F."""
    for schedule in (catalog.dualpipe(p, 2 * m), catalog.dualpipe_v(p, m)):
        program = schedule.lower(1).verify()
        assert set(program.peak_activations()) == {p + 1}
        machine = replace(UNIT, overlap_time=overlap)
        spans = simulate(program, unit_costs(p, backward=2.0), machine).spans
        first = [s for s in spans if s.rank == 0 and s.lane == "compute"]
        idle = max(s.end for s in first) - sum(s.end - s.start for s in first)
        published = (p / 2 - 1) * (3 * overlap + 2 - 3)
        if overlap == 1 or p <= 4:
            assert idle == pytest.approx(published)
        else:
            assert idle < published


def test_both_directions_of_dualpipe_mirror_each_other():
    schedule = catalog.dualpipe(4, 8)
    starts = schedule.timing.starts
    for op, start in starts.items():
        other = op._replace(microbatch=op.microbatch ^ 1)
        assert starts[other] == start
        rank = schedule.rank(op.stage, op.microbatch)
        assert schedule.rank(op.stage, other.microbatch) == 3 - rank
    assert Schedule.from_csv(schedule.to_csv(), name="DualPipe") == schedule


@pytest.mark.parametrize(
    ("make", "sizes", "message"),
    [
        (catalog.dualpipe, (4, 6), "6 for 4 stages"),
        (catalog.dualpipe, (4, 9), "even number of micro-batches"),
        (catalog.dualpipe_v, (4, 3), "3 for 4 stages"),
        (catalog.dualpipe, (3, 8), "make 3 stages even"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, sizes, message):
    with pytest.raises(UserError, match=message):
        make(*sizes)

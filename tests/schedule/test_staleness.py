"""Staleness derived from timing: the closed form, and nothing less is possible."""

from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import quick, schedules
from toolkit.errors import UserError
from toolkit.schedule import Kind, Op, catalog


@pytest.mark.parametrize(
    ("n", "k"), [*((n, 1) for n in range(2, 33)), *product(range(2, 9), range(2, 5))]
)
def test_freshest_cyclic_is_the_closed_form(n, k):
    """If workers accumulate, only their first micro-batches can be late."""
    assert catalog.cyclic(n, accumulate=k).staleness == tuple(
        tuple(0 if (j + 1) + (m + 1) >= n + 1 else 1 for m in range(k * n))
        for j in range(n)
    )
    assert catalog.data_parallel(n, delay="freshest", accumulate=k).max_staleness == 0


def test_freshest_cyclic_for_three_as_in_the_paper():
    assert catalog.cyclic(3).staleness == ((1, 1, 0), (1, 0, 0), (0, 0, 0))


def least_by_search(when, stage, microbatch, n_microbatches):
    """Try d = 0, 1, ...: update t - d - 1 must have ended when the forward of step t starts."""
    kinds = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    ops = [Op(kind, stage, m) for kind in kinds for m in range(n_microbatches)]
    ready = max(
        when.starts[op] + when.ticks_per_slot for op in ops if op in when.starts
    )
    start = when.starts[Op(Kind.FORWARD, stage, microbatch)]
    return next(d for d in count() if ready - (d + 1) * when.period <= start)


@given(schedules(chains=["in_order"]), st.data())
@quick
def test_freshest_is_what_a_search_finds_and_one_less_is_refused(schedule, data):
    least = replace(schedule, delay="freshest").staleness
    for j, row in enumerate(least):
        for m, d in enumerate(row):
            assert d == least_by_search(schedule.timing, j, m, schedule.n_microbatches)
    assert replace(schedule, delay=least).staleness == least
    late = [(j, m) for j, row in enumerate(least) for m, d in enumerate(row) if d > 0]
    for j, m in [data.draw(st.sampled_from(late))] if late else []:
        matrix = [list(row) for row in least]
        matrix[j][m] -= 1
        why = rf"stage {j} on micro-batch {m} .* {matrix[j][m]} steps late.* delay={least[j][m]} "
        with pytest.raises(UserError, match=rf"(?s){why}.*\nslot .*\[{j}F{m}\][^\[]*$"):
            replace(schedule, delay=matrix)


@pytest.mark.parametrize(
    ("delay", "message"),
    [
        ("fresh", r"unknown delay 'fresh': give 'freshest'"),
        ("1", r"unknown delay '1': give 'freshest'"),
        (-1, r"-1"),
        (1.0, r"1\.0"),
        (True, r"True"),
        (None, r"None"),
        ([[1, 1], [1, -1]], r"-1"),
        ([[1, 1], [1, 0.5]], r"0\.5"),
        (["11", "11"], r"'11'"),
        ([], r"2 x 2 .* got \(\)"),
        ([1, [1, 1]], r"2 x 2 .* got \(1, \(1, 1\)\)"),
        ([1], r"2 stages.* got \(1,\)"),
        ([1, -1], r"-1"),
        ([[1, 1], [1]], r"2 x 2 .* got \(\(1, 1\), \(1,\)\)"),
        (np.zeros((2, 3), int), r"2 x 2 .* got \(\(0, 0, 0\), \(0, 0, 0\)\)"),
        (np.full((2, 2), 0.5), r"0\.5"),
        (np.ones(2, bool), r"True"),
    ],
    ids=str,
)
def test_refuses_an_invalid_delay(delay, message):
    with pytest.raises(UserError, match=message):
        catalog.cyclic(2, delay)


@pytest.mark.parametrize("method", [catalog.data_parallel, catalog.cyclic])
@pytest.mark.parametrize("state", ["replicated", "sharded"])
@pytest.mark.parametrize(
    "placement", ["one", "per_microbatch", "per_stage_and_microbatch"]
)
def test_any_delay_is_read_by_forward_and_backward(method, state, placement):
    least = [[1, 1, 0], [1, 0, 0], [0, 0, 0]] if method is catalog.cyclic else 0
    for delay in (least, 1, 2, 5, [3, 1, 5], [[1, 2, 3], [3, 2, 1], [1, 1, 4]]):
        schedule = method(3, placement=placement, state=state, delay=delay)
        rows = delay if isinstance(delay, list) else [delay] * 3
        rows = [row if isinstance(row, list) else [row] * 3 for row in rows]
        assert schedule.staleness == schedule.least_staleness == tuple(map(tuple, rows))
        assert schedule.mean_staleness == sum(map(sum, rows)) / 9
        schedule.lower(8).verify()  # every op reads what the staleness promises


def test_as_published():
    """4 stages on 8 workers: one step late where stage < 3 - worker."""
    schedule = catalog.published(8)
    rows = [(1, 1, 1), (1, 1, 0), (1, 0, 0), (0, 0, 0)]
    assert schedule.staleness == tuple((*row, 0, 0, 0, 0, 0) for row in rows)
    schedule.lower(3).verify()
    assert schedule.timing == catalog.data_parallel(8, n_stages=4).timing
    with pytest.raises(
        UserError, match="stage 0 on micro-batch 3 cannot read weights 0 steps"
    ):
        catalog.cyclic(8, schedule.delay, n_stages=4)
    for n in range(2, 9):
        assert catalog.published(n, n_stages=n).staleness == catalog.cyclic(n).staleness


def test_shows_where_a_delay_is_too_small():
    with pytest.raises(UserError, match="cannot read weights") as refusal:
        catalog.cyclic(2, 0)
    assert str(refusal.value).splitlines()[1:] == [
        "slot   0     1   2   3   4   5",
        "rank 0 [0F0] 1F0 1B0 0B0 .   .",
        "rank 1 .     .   0F1 1F1 1B1 0B1",
    ]

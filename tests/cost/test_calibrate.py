"""Costs read from a timeline: what was put into the simulation comes out of it."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick
from toolkit.cost import (
    UNIT,
    Hardware,
    Span,
    StageCost,
    Timeline,
    calibrate,
    predict_calibrated,
    recomputing,
    simulate,
    unit_costs,
)
from toolkit.schedule import Action, catalog

FIRST = StageCost(
    7.0, 9.0, 10.0, 6.0, 4.0, 8.0, 2.0, forward_seconds=2.0, backward_seconds=3.0
)
SECOND = StageCost(
    1.0, 1.0, 20.0, 4.0, 6.0, 12.0, 1.0, forward_seconds=1.0, backward_seconds=4.0
)
LATENT = Hardware(
    "latent", 1.0, memory_bandwidth=10.0, link_bandwidth=inf, link_latency=0.5
)


def timeline(*spans):
    return Timeline("by hand", 1, spans, (), (1.0,))


def compute(name, seconds, start=0.0):
    stage = int(name.rstrip("0123456789")[:-1])
    return Span(0, "compute", start, start + seconds, name, stage, 0, 0)


def link(lane, seconds, stage=0):
    return Span(0, lane, 1.0, 1.0 + seconds, "weights", stage, None, 0, 8.0, 1)


def update(stage, seconds):
    return Span(0, "update", 2.0, 2.0 + seconds, f"update {stage}", stage, None, 0)


# By hand


def test_medians_of_each_stage_and_of_messages():
    """Messages take the median whatever their size; updates the median time of their bytes: each
    moves five times its parameters, of 8 bytes here and of 12 there."""
    spans = [
        compute(f"0F{m}", seconds, 10.0 * m) for m, seconds in enumerate((1, 2, 30))
    ]
    spans += [compute(f"0B{m}", seconds) for m, seconds in enumerate((4, 40, 5))]
    spans += [compute("1F0", 7), compute("1F1", 9), compute("1B10", 6)]
    spans += [link("send", 1.0), link("receive", 2.0), link("send", 9.0)]
    spans += [update(0, 4.0), update(1, 6.0), update(1, 60.0)]
    (first, second), links = calibrate(timeline(*spans), (FIRST, SECOND))
    assert first == replace(FIRST, forward_seconds=2, backward_seconds=5)
    assert second == replace(SECOND, forward_seconds=8, backward_seconds=6)
    assert links.memory_bandwidth == pytest.approx(10)
    assert replace(links, memory_bandwidth=inf) == Hardware(
        "calibrated", inf, inf, inf, 2
    )


def test_what_was_not_seen_takes_no_time():
    unseen = Hardware("calibrated", inf, inf, inf)
    spans = [compute("0F0", 1), compute("0B0", 1)]
    assert calibrate(timeline(*spans), (FIRST,))[1] == unseen
    spans += [update(0, 1.0)]  # of no bytes
    assert (
        calibrate(timeline(*spans), (replace(FIRST, parameter_bytes=0.0),))[1] == unseen
    )


# Of the simulator's own timelines


SCHEDULES = [
    catalog.cyclic(2, 1),
    catalog.cyclic(2, "freshest", state="sharded"),
    catalog.cyclic(2, 1, "per_stage"),
    catalog.gradient_accumulation(2, 3),
    catalog.gpipe(2, 3),
    catalog.one_f_one_b(2, 4),
    catalog.zero_bubble(2, 3),
    catalog.pipedream_2bw(2, 3),
    catalog.cyclic(2, 1, correction="extrapolate"),
]


@pytest.mark.parametrize(
    "schedule", SCHEDULES, ids=lambda s: f"{s.name} {s.layout.name}"
)
@pytest.mark.parametrize("checkpoint", ["none", [1]])
def test_what_was_put_in_comes_out_and_predicts_the_run(schedule, checkpoint):
    costs = recomputing((FIRST, SECOND), checkpoint)
    seen = simulate(schedule.lower(4), costs, LATENT)
    found, links = calibrate(seen, costs)
    assert found == costs
    assert links.memory_bandwidth == pytest.approx(10)
    assert links.link_latency == pytest.approx(0.0 if schedule.n_ranks == 1 else 0.5)
    blank = [replace(c, forward_seconds=None, backward_seconds=None) for c in costs]
    again = predict_calibrated(seen, schedule, blank)
    assert again.name == f"{schedule.name}, predicted"
    assert again.step_ends == pytest.approx(seen.step_ends)
    assert again.end == pytest.approx(seen.end)


def test_an_op_contains_its_collectives():
    """Devices of a rank exchange within an op, whose measured seconds have that."""
    costs = []
    for cost in (FIRST, SECOND):
        shared = replace(cost, exchange_seconds=0.5, backward_exchange_seconds=0.25)
        costs.append(shared)
    schedule = catalog.one_f_one_b(2, 4)
    seen = simulate(schedule.lower(4), costs, LATENT)
    again = predict_calibrated(seen, schedule, costs)
    assert again.step_ends == pytest.approx(seen.step_ends)


def test_it_predicts_the_memory_that_was_measured():
    """Ranks do not see what their ops need while they run."""
    schedule = catalog.cyclic(2, 1)
    costs = [replace(cost, backward_working_bytes=5.0) for cost in (FIRST, SECOND)]
    seen = simulate(schedule.lower(4), costs, LATENT)
    kinds = {"weights", "activations", "gradients"}
    assert {change.kind for change in seen.changes} == kinds | {
        "stage inputs",
        "working",
    }
    measured = replace(seen, changes=[c for c in seen.changes if c.kind in kinds])
    again = predict_calibrated(measured, schedule, costs)
    assert {change.kind for change in again.changes} == kinds
    for kind in kinds:
        assert again.peak_memory(kind=kind) == seen.peak_memory(kind=kind)


# Eighths, whose sums are exact: where moments coincide, the last bit decides what comes first.
seconds = st.integers(1, 64).map(lambda eighths: eighths / 8)


@given(programs(), st.data())
@quick
def test_it_predicts_any_run_without_collectives(program, data):
    """Where messages are alike: each takes the latency and no more."""
    collective = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
    assume(not any(i.action in collective for order in program.ranks for i in order))
    costs = [
        StageCost(
            *[1] * 6,
            forward_seconds=data.draw(seconds),
            backward_seconds=data.draw(seconds),
        )
        for _ in range(program.schedule.n_stages)
    ]
    seen = simulate(program, costs, replace(UNIT, link_latency=data.draw(seconds)))
    found, links = calibrate(seen, costs)
    for cost, expected in zip(found, costs, strict=True):
        assert cost.seconds(UNIT) == pytest.approx(expected.seconds(UNIT))
    assert simulate(program, found, links).step_ends == pytest.approx(seen.step_ends)


@pytest.mark.parametrize(
    "schedule", [catalog.data_parallel(4), catalog.data_parallel(4, state="sharded")]
)
def test_it_predicts_collectives(schedule):
    """Which are several rounds of messages: 2(n-1) of a ring, log2(n) of a tree."""
    program = schedule.lower(3)
    costs = unit_costs(4)
    seen = simulate(program, costs, replace(UNIT, link_latency=0.5))
    assert simulate(program, *calibrate(seen, costs)).step_time == pytest.approx(
        seen.step_time
    )

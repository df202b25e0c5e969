"""How many training steps a prediction simulates."""

import random
from dataclasses import replace

import pytest

from toolkit.cost import Hardware, StageCost, simulate
from toolkit.cost.steady_steps import SteadySimulator, simulate_steady_steps
from toolkit.schedule import after, catalog
from toolkit.schedule.steady_state import steps_to_time

LINKS = Hardware("links", 1e12, 5e10, 1.25e9, 5e-5)


def unequal_costs(n_stages):
    """Stages of unequal computing and parameters, as a model's are."""
    draw = random.Random(1)
    costs = []
    for _ in range(n_stages):
        cost = StageCost(
            8e9 * draw.uniform(0.5, 1.5) / n_stages,
            16e9 / n_stages,
            parameter_bytes=1e8 / n_stages * draw.uniform(0.3, 2),
            activation_bytes=1e6,
            output_bytes=3e6,
            input_bytes=3e6,
        )
        costs.append(cost)
    return tuple(costs)


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.data_parallel(4),
        catalog.data_parallel(4, state="sharded"),
        catalog.gpipe(4, 8),
        catalog.one_f_one_b(4, 8),
        catalog.zero_bubble(4, 8),
        catalog.interleaved_1f1b(2, 4, 2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_steps_that_repeat_are_simulated_until_they_do(schedule):
    costs = unequal_costs(schedule.n_stages)
    timeline = SteadySimulator(schedule, timed=2).timeline(costs, LINKS)
    longer = simulate(schedule.lower(8).verify(), costs, LINKS)
    assert len(timeline.step_ends) == 3
    assert timeline.step_time == pytest.approx(longer.step_time, rel=1e-9)
    assert timeline.bytes_a_step() == pytest.approx(longer.bytes_a_step())
    for rank in range(schedule.n_ranks):
        assert timeline.peak_memory(rank) == pytest.approx(longer.peak_memory(rank))


def test_steps_that_do_not_repeat_at_once_are_simulated_for_longer():
    schedule = catalog.eager_1f1b(4, 16)
    costs = unequal_costs(4)
    slow = replace(LINKS, link_bandwidth=3e8, link_latency=1e-4)
    timeline = SteadySimulator(schedule, timed=2).timeline(costs, slow)
    program = schedule.lower(steps_to_time(schedule, 1)).verify()
    assert timeline == simulate(program, costs, slow)
    assert len(timeline.step_ends) > 3
    assert simulate_steady_steps(schedule, costs, slow) == timeline


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.cyclic(4, 1),
        catalog.cyclic(4, "freshest"),
        after([(catalog.data_parallel(2), 5)], catalog.data_parallel(2)),
    ],
    ids=["CDP-v1", "CDP-v2", "phases"],
)
def test_others_take_as_many_steps_as_are_to_be_timed(schedule):
    costs = unequal_costs(schedule.n_stages)
    timeline = SteadySimulator(schedule, timed=2).timeline(costs, LINKS)
    assert len(timeline.step_ends) == steps_to_time(schedule, 2)

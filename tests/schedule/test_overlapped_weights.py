"""The most weights that a rank can hold when messages and updates overlap with ops."""

import random

import pytest
from hypothesis import given, strategies

from tests.schedule.strategies import programs, quick
from toolkit.cost import Hardware, StageCost, simulate
from toolkit.schedule import catalog
from toolkit.schedule.overlapped_weights import most_weights


@pytest.mark.parametrize(
    ("schedule", "in_order", "most"),
    [
        (catalog.data_parallel(3), (4, 4, 4), (4, 4, 4)),
        (catalog.one_f_one_b(3, 6), (2, 2, 2), (2, 2, 2)),
        (catalog.cyclic(4, 1, "per_stage"), (3, 3, 3, 3), (3, 3, 3, 3)),
        # The next version arrives while the first workers still read all of the version before.
        (catalog.cyclic(4, 1), (4, 4, 4, 9), (8, 8, 8, 9)),
        (catalog.cyclic(4), (5, 4, 4, 5), (7, 6, 5, 5)),
        (catalog.cyclic(4, 1, chains="rotated"), (5, 5, 6, 7), (9, 9, 9, 9)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_by_hand(schedule, in_order, most):
    program = schedule.lower(6)
    assert program.peak_weights() == in_order
    assert most_weights(program) == most


@pytest.mark.parametrize("n", range(2, 9))
def test_the_first_of_n_workers_can_hold_two_models(n):
    assert most_weights(catalog.cyclic(n, 1).lower(5))[0] == 2 * n


def test_sizes_of_stages():
    program = catalog.data_parallel(2, n_stages=3).lower(3)
    # The largest is held twice.
    assert most_weights(program, [1, 10, 100]) == (211, 211)


def on_some_machine(program, draw):
    """``[rank]``, the most weights in a simulation; updates take no time."""
    costs = [
        StageCost(1.0, 2.0, parameter_bytes=1.0, forward_seconds=a, backward_seconds=b)
        for a, b in (
            (draw.random(), draw.random()) for _ in range(program.schedule.n_stages)
        )
    ]
    links = draw.choice([float("inf"), 10.0, 1.0])
    timeline = simulate(program, costs, Hardware("any", 1.0, float("inf"), links, 0.0))
    return [timeline.peak_memory(rank, "weights") for rank in range(timeline.n_ranks)]


@quick
@given(programs(), strategies.randoms(use_true_random=False))
def test_no_machine_passes_it(program, draw):
    pairs = zip(on_some_machine(program, draw), most_weights(program), strict=True)
    assert all(held <= most for held, most in pairs)


@pytest.mark.parametrize("delay", [1, "freshest"])
def test_is_reached_by_some_machine(delay):
    """In part: updates that take no time need no second copy."""
    program, draw = catalog.cyclic(3, delay).lower(6), random.Random(0)
    peaks = [on_some_machine(program, draw) for _ in range(40)]
    reached = [max(of_rank) for of_rank in zip(*peaks, strict=True)]
    assert reached == {1: [6, 6, 6], "freshest": [5, 4, 3]}[delay]

"""What null models show of the runtime's own time."""

import numpy as np
import pytest
import torch
from torch import nn

from toolkit.cost import StageCost
from toolkit.model import partition
from toolkit.plan.runtime_overhead import RuntimeOverhead, count, solve
from toolkit.schedule import catalog

N_STAGES = 2
PARAMETER_BYTES = 100.0


def cut():
    """Stages of 2 and 4 tensors."""
    layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)]
    return partition(nn.Sequential(*layers), 2, torch.zeros(1, 2), ["1"])


def costs():
    cost = StageCost(
        1.0,
        1.0,
        parameter_bytes=PARAMETER_BYTES,
        forward_seconds=2.0,
        backward_seconds=3.0,
    )
    return (cost,) * N_STAGES


def test_solve_finds_what_each_thing_takes():
    counts = np.array(
        [
            [2, 8, 1, 0, 1],
            [4, 8, 3, 9e6, 1],
            [8, 64, 3, 1e3, 2],
            [2, 16, 5, 2e6, 4],
            [2, 16, 9, 8e6, 4],
        ]
    )
    seconds_of_thing = [0.5, 0.25, 0.125, 1e-9, 2.0]
    found = solve(counts, counts @ seconds_of_thing)
    assert found == RuntimeOverhead(*map(pytest.approx, seconds_of_thing))


def test_nothing_takes_negative_seconds():
    """Noise can make it seem so; the others then explain all."""
    counts = np.array([[1, 0, 1, 0, 0], [2, 0, 1, 0, 0], [3, 0, 1, 0, 0]])
    found = solve(counts, np.array([0.9, 1.9, 2.9]))
    assert found.message == 0
    assert found.op == pytest.approx(0.95, rel=0.05)


@pytest.mark.parametrize("steps", [1, 3])
def test_counts_are_those_of_a_step_and_rank(steps):
    program = catalog.data_parallel(2, n_stages=N_STAGES, accumulate=3).lower(steps)
    counts = count(program, cut(), costs())
    n_ops, n_tensors, n_messages, n_bytes, n_updates = counts
    assert (n_ops, n_updates) == (2 * N_STAGES * 3, N_STAGES)
    assert n_tensors == 2 * 3 * (2 + 4)
    assert n_messages == N_STAGES  # an all-reduce a stage
    assert n_bytes == N_STAGES * PARAMETER_BYTES


def test_an_op_takes_its_share_of_all():
    overhead = RuntimeOverhead(op=1.0, tensor=0.1, message=5.0, byte=0.01, update=7.0)
    schedule = catalog.data_parallel(2, n_stages=N_STAGES)
    program = schedule.lower(2)
    # Of a rank: 4 ops of 3 tensors in the mean, 2 messages of 100 bytes, and 2 updates.
    more = 1.0 + 0.1 * 3 + (2 * 5.0 + 2 * 1.0 + 2 * 7.0) / 4
    for cost in overhead.added_to(costs(), program, cut()):
        assert cost.forward_seconds == pytest.approx(2.0 + more)
        assert cost.backward_seconds == pytest.approx(3.0 + more)


def test_halves_of_a_backward_are_two_ops():
    overhead = RuntimeOverhead(1.0, 0.0, 0.0, 0.0, 0.0)
    program = catalog.zero_bubble(N_STAGES, 4).lower(1)
    (cost, _) = overhead.added_to(costs(), program, cut())
    assert cost.forward_seconds == pytest.approx(3.0)
    assert cost.backward_seconds == pytest.approx(5.0)

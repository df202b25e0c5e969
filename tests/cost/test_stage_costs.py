"""Stage costs: seconds, what stages keep that recompute, and numbers that are refused."""

from dataclasses import fields, replace
from math import inf, nan

import pytest
import torch
from torch import nn

from toolkit.cost import (
    UNIT,
    Hardware,
    StageCost,
    profile,
    recomputing,
    unit_costs,
)
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.kernel_work import Work

FLOAT = 4
MACHINE = Hardware("hand", flops=2.0, memory_bandwidth=5.0, link_bandwidth=1.0)


def test_stages_that_recompute_keep_their_inputs():
    """And the next one what it is given, though it is made on the same rank."""
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    plain = profile(
        partition(model, 2, torch.zeros(5, 3), by=["3"]), torch.zeros(5, 3).to("meta")
    )
    assert [cost.extra_input_bytes for cost in plain] == [0, 5 * 4 * FLOAT]
    first, second = recomputing(plain, [0])
    assert (first.kept_bytes, second) == (2 * 4 * FLOAT, plain[1])
    first, second = recomputing((plain[0], replace(plain[1], extra_input_bytes=0)), [0])
    assert second.extra_input_bytes == 5 * 4 * FLOAT
    assert first.activation_bytes == plain[0].activation_bytes > 0
    assert [cost.recomputes for cost in recomputing(plain, "all")] == [True, True]
    assert recomputing(plain, "none") == plain


@pytest.mark.parametrize(
    ("checkpoint", "value"), [([0, 2], "2"), ("some", "'some'"), (1, "1")]
)
def test_stages_that_cannot_recompute(checkpoint, value):
    with pytest.raises(UserError, match=value):
        recomputing(unit_costs(2), checkpoint)


def test_seconds_are_measured_or_by_the_roofline_of_each_kernel():
    bare = StageCost(flops=3.0, backward_flops=6.5)
    assert bare.seconds(MACHINE) == (1.5, 3.25)
    measured = replace(bare, forward_seconds=0.25, backward_seconds=0.5)
    assert measured.seconds(MACHINE) == (0.25, 0.5)
    kernels = replace(
        bare, kernels=(Work(2, 1), Work(1, 10)), backward_kernels=(Work(4, 20),)
    )
    assert kernels.seconds(MACHINE) == (1 + 2, 4)


NUMBERS = [f.name for f in fields(StageCost) if "kernels" not in f.name]


@pytest.mark.parametrize("value", [-1.0, -1, nan, inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_senseless_numbers_are_refused(name, value):
    numbers = {"flops": 1.0, "backward_flops": 1.0} | {name: value}
    with pytest.raises(UserError, match=f"{name}.*{value}"):
        StageCost(**numbers)
    with pytest.raises(UserError, match=r"5\.0"):  # both seconds or none
        StageCost(1.0, 1.0, forward_seconds=5.0)


def test_a_given_share_of_weights_counts():
    cost = StageCost(
        1.0, 2.0, forward_seconds=1.0, backward_seconds=2.0, weight_share=0.25
    )
    assert cost.op_seconds(UNIT) == [1.0, 2.0, 1.5, 0.5]
    assert replace(cost, weight_share=None).op_seconds(UNIT) == [1.0, 2.0, 1.0, 1.0]
    with pytest.raises(UserError, match="weight_share"):
        replace(cost, weight_share=1.5)

"""Gradients that are not known yet: a clipping is noted, and all else is refused."""

from math import inf, isnan

import pytest
import torch
from torch import nn

from toolkit.errors import UserError
from toolkit.runtime.pending_gradients import PendingGradient
from toolkit.runtime.step_optimizer import Clip


@pytest.fixture
def layer():
    layer = nn.Linear(3, 2)
    layer.notes = []
    for parameter in layer.parameters():
        parameter.grad = PendingGradient.like(parameter, layer.notes.append)
    return layer


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({}, Clip(0.7)),
        ({"foreach": False}, Clip(0.7)),
        ({"foreach": True}, Clip(0.7)),
        ({"error_if_nonfinite": True}, Clip(0.7)),
        ({"norm_type": 1.0}, Clip(0.7, 1.0)),
        ({"norm_type": inf}, Clip(0.7, inf)),
    ],
)
def test_a_clipping_is_noted(layer, options, clip):
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 0.7, **options)
    assert layer.notes
    assert set(layer.notes) == {clip}
    assert isnan(norm.item())
    assert f"{norm:.2f}" == "nan"


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: nn.utils.clip_grad_value_(layer.parameters(), 0.1),
        lambda layer: layer.weight.grad.add_(1.0),
        lambda layer: layer.weight.grad.mul_(0.5),
        lambda layer: layer.weight.grad.zero_(),
        lambda layer: bool(layer.weight.grad.norm() > 1.0),
    ],
)
def test_what_needs_values_is_refused(layer, change):
    with pytest.raises(UserError, match="clip_grad_norm_"):
        change(layer)
    assert layer.notes == []


def test_values_are_unknown(layer):
    assert layer.weight.grad.shape == (2, 3)
    assert torch.isnan(torch.as_tensor(layer.weight.grad.abs().mean().item()))

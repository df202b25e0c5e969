"""Optimizers of stages, made from one finished optimizer; and what a loop sets on it."""

import copy

import pytest
import torch
from prodigyopt import Prodigy
from schedulefree import SGDScheduleFree
from torch import nn
from torch.optim.lr_scheduler import StepLR

from toolkit.errors import UserError
from toolkit.runtime.loop_settings import LoopSettings
from toolkit.runtime.stage_optimizers import StageOptimizers
from toolkit.runtime.step_optimizer import Clip


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def trained(net, optimizer, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        optimizer.step()


def test_stages_continue_the_whole():
    """With its groups, options and state; a group may be empty in a stage."""
    net = model()
    groups = [
        {"params": [*net[0].parameters()], "lr": 0.1},
        {"params": [*net[1].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    trained(net, optimizer)
    expected = copy.deepcopy(net)
    continued = copy.deepcopy(optimizer)
    optimizers = StageOptimizers(optimizer, net)
    stages = [
        optimizers.make([(f"{k}.{name}", p) for name, p in net[k].named_parameters()])
        for k in (0, 1)
    ]
    assert [
        [len(group["params"]) for group in stage.param_groups] for stage in stages
    ] == [
        [2, 0],
        [0, 2],
    ]
    assert [stage.param_groups[0]["lr"] for stage in stages] == [0.1, 0.1]
    # The copy of the optimizer has copies of the parameters.
    flat = [p for group in continued.param_groups for p in group["params"]]
    for parameter, twin in zip(flat, expected.parameters(), strict=True):
        twin.data = parameter.data
    for parameters, optimizers_of in ((net.parameters(), stages), (flat, [continued])):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        for stage in optimizers_of:
            stage.step()
    for parameter, twin in zip(net.parameters(), flat, strict=True):
        torch.testing.assert_close(parameter, twin, rtol=0, atol=0)


def test_states_by_name_are_those_of_torch():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trained(net, optimizer)
    optimizers = StageOptimizers(optimizer, net)
    whole = optimizers.as_torch(optimizers.state())
    expected = optimizer.state_dict()
    assert whole["param_groups"] == expected["param_groups"]
    for index, values in expected["state"].items():
        torch.testing.assert_close(whole["state"][index], values, rtol=0, atol=0)
    of_parameters, options = optimizers.from_torch(whole)
    assert (
        sorted(of_parameters) == sorted(options) == sorted(dict(net.named_parameters()))
    )
    of_stage = optimizers.state_of_stage(["1.weight", "1.bias"], of_parameters, options)
    assert of_stage["param_groups"][0]["params"] == [0, 1]
    assert of_stage["state"][1] == whole["state"][3]


@pytest.mark.parametrize(
    ("make", "couples"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: torch.optim.AdamW(p, lr=0.1), False),
        (lambda p: torch.optim.LBFGS(p, lr=0.1), False),
        (lambda p: SGDScheduleFree(p, lr=0.1), False),
        (Prodigy, True),
    ],
)
def test_coupled_parameters(make, couples):
    net = nn.Linear(3, 2)
    before = copy.deepcopy(net.state_dict())
    assert StageOptimizers(make(net.parameters()), net).couples() == couples
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)


def test_what_is_no_optimizer_of_the_model_is_refused():
    net = model()
    with pytest.raises(UserError, match="parameter of shape"):
        StageOptimizers(torch.optim.SGD(model().parameters(), lr=0.1), net)
    with pytest.raises(UserError, match="int"):
        StageOptimizers(3, net)
    hooked = torch.optim.SGD(net.parameters(), lr=0.1)
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UserError, match="hook"):
        StageOptimizers(hooked, net)


def test_only_what_the_loop_changes_is_handed_over():
    optimizer = torch.optim.SGD(
        model().parameters(), lr=torch.tensor(0.1), momentum=0.9
    )
    scheduler = StepLR(optimizer, 1, 0.5)
    settings = LoopSettings(optimizer)
    settings.note(0, oldest=-1, clips_as_before=False)
    assert settings.of_steps[0].options == [{}]
    optimizer.step()
    scheduler.step()  # the rate is a tensor that is changed in place
    settings.note(1, oldest=0, clips_as_before=False)
    assert float(settings.of_steps[1].options[0]["lr"]) == pytest.approx(0.05)
    assert settings.of_steps[1].options[0].keys() == {"lr"}
    # Optimizers that are made from now on begin with the new rate, and may need the one before.
    assert float(settings.of_steps[0].options[0]["lr"]) == pytest.approx(0.1)
    settings.note(2, oldest=1, clips_as_before=False)
    assert sorted(settings.of_steps) == [1, 2]
    assert settings.of_steps[2].options[0].keys() == {"lr"}
    assert settings.changed_options() == {(0, "lr")}


def test_clipping_counts_at_once_or_from_the_next_step():
    settings = LoopSettings(torch.optim.SGD(model().parameters(), lr=0.1))
    settings.note(0, oldest=0, clips_as_before=True)
    settings.note_clip(Clip(1.0))
    settings.clip_update(0)
    settings.note(1, oldest=0, clips_as_before=True)
    settings.note(2, oldest=0, clips_as_before=True)
    assert [settings.of_steps[step].clip for step in range(3)] == [
        Clip(1.0),
        Clip(1.0),
        None,
    ]

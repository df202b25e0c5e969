"""The optimizer's state of a device, predicted from a step on tensors without values."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from toolkit.cost import profile
from toolkit.model import partition
from toolkit.runtime import by_name
from toolkit.runtime.meters.meter import optimizer_bytes_by_weight
from toolkit.schedule import catalog
from toolkit.training.optimizers import muon
from toolkit.training.run_prediction import predict_optimizer_bytes

FLOAT = 4
FIRST, SECOND = 8 * 8 + 8, 8 * 4 + 4  # weights of the stages


def model():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


@pytest.fixture(scope="module")
def stages_and_costs():
    example = torch.empty(2, 8, device="meta")
    with torch.device("meta"):
        stages = partition(model(), 2, example, by=["2"])
    return stages, profile(stages, example)


def halved(costs):
    """As of two devices that share all weights."""
    return [replace(cost, parameter_bytes=cost.parameter_bytes / 2) for cost in costs]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters)


@by_name
def hidden_by_muon(parameters):
    return muon(parameters, adamw=(r"^2\.",), lr=0.1)


class ReadsValues(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.grad.norm().item()


@pytest.mark.parametrize(
    ("make", "words"),
    [(sgd, 0), (momentum, 1), (adam, 2)],
    ids=["SGD", "momentum", "Adam"],
)
def test_state_is_as_many_numbers_as_an_optimizer_keeps(stages_and_costs, make, words):
    stages, costs = stages_and_costs
    per_stage = catalog.one_f_one_b(2, 2)
    one, two = words * FLOAT * FIRST, words * FLOAT * SECOND
    assert predict_optimizer_bytes(stages, costs, per_stage, make) == [one, two]
    assert predict_optimizer_bytes(stages, halved(costs), per_stage, make) == [
        one / 2,
        two / 2,
    ]
    # Each worker updates the whole model; of sharded states each stage has an owner.
    workers = catalog.data_parallel(2)
    assert predict_optimizer_bytes(stages, costs, workers, make) == [one + two] * 2
    owners = catalog.data_parallel(2, state="sharded")
    assert sum(predict_optimizer_bytes(stages, costs, owners, make)) == one + two


def test_state_that_differs_among_weights_is_known_where_they_are_whole(
    stages_and_costs,
):
    stages, costs = stages_and_costs
    schedule = catalog.one_f_one_b(2, 2)
    expected = []
    for stage in partition(model(), 2, torch.zeros(2, 8), by=["2"]):
        optimizer = hidden_by_muon([*stage.named_parameters()])
        for weight in stage.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        expected.append(sum(optimizer_bytes_by_weight(optimizer).values()))
    assert predict_optimizer_bytes(stages, costs, schedule, hidden_by_muon) == expected
    assert (
        predict_optimizer_bytes(stages, halved(costs), schedule, hidden_by_muon) == []
    )


def test_an_optimizer_that_reads_values_has_no_prediction(stages_and_costs):
    stages, costs = stages_and_costs
    schedule = catalog.one_f_one_b(2, 2)

    def make(parameters):
        return ReadsValues(parameters, lr=0.1)

    assert predict_optimizer_bytes(stages, costs, schedule, make) == []

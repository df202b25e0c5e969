"""Models that take or return dictionaries follow the reference, exported or by hand."""

import pytest
import torch
from torch import nn

from tests.runtime.models import (
    assert_same,
    id_batches,
    masked,
    masked_batches,
    masked_stages,
    name_of,
    scores_loss,
    stage_of,
)
from tests.runtime.reference import sgd, trajectory
from toolkit.errors import UserError
from toolkit.runtime import SingleProcess
from toolkit.schedule import catalog


class Plain(nn.Module):
    """A masked model as one of a tensor alone, for the reference."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, rows):
        ids, mask = rows.unbind(1)
        result = self.model(ids=ids, more={"mask": mask})
        # The reference wants a gradient of each weight.
        return result["scores"] + 0 * result["others"][0].sum()


def optimizer(parameters):
    return sgd(parameters, None)


def train(schedule, order, by_hand):
    stages = masked_stages(masked(), by_hand)
    runtime = SingleProcess(stages, schedule, optimizer, scores_loss, order)
    results = list(runtime.run(masked_batches(schedule.n_microbatches)))
    return runtime, results


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("order", ["grouped", "scheduled"])
@pytest.mark.parametrize(
    "schedule", [catalog.cyclic(4, n_stages=2), catalog.one_f_one_b(2, 4)], ids=name_of
)
def test_follows_the_reference(schedule, order, by_hand):
    runtime, results = train(schedule, order, by_hand)
    batches = [
        (torch.stack([x["ids"], x["more"]["mask"]], 1), y)
        for x, y in masked_batches(schedule.n_microbatches)
    ]
    home = stage_of(masked_stages(masked(), False))
    stage = lambda name: home(name.removeprefix("model."))  # noqa: E731
    expected = trajectory(Plain(masked()), stage, schedule.staleness, batches, sgd)[-1]
    found = runtime.module().state_dict()
    short = {"0": "model.encoder", "1": "model.pooler"}
    named = {
        f"{short[k.partition('.')[0]]}.{k.partition('.')[2]}"
        if by_hand
        else f"model.{k}": x
        for k, x in found.items()
    }
    assert_same(named, expected)
    assert results[-1].outputs.shape == (8, 3)  # the first tensor of the result


def test_the_module_takes_what_the_model_takes():
    runtime, _ = train(catalog.cyclic(2), "grouped", False)
    (inputs, _), *_ = masked_batches(2)
    assert runtime.module()(**inputs)["scores"].shape == (4, 3)


def test_another_structure_is_refused():
    runtime, _ = train(catalog.cyclic(2), "grouped", False)
    ids, answers = id_batches(2)[0]
    with pytest.raises(
        UserError, match="inputs: got 1 tensors; expected 2, ids and more_mask"
    ):
        runtime.step(ids, answers)

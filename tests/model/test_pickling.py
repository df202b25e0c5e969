"""Stages that another process of the program loads."""

import pickle
import threading

import pytest
import torch

from tests.runtime import models
from toolkit.errors import UserError
from toolkit.model.pickling import dumps
from toolkit.schedule import catalog

CASES = {
    "traced": lambda: models.cut(models.residual(), catalog.cyclic(2)),
    "awkward": lambda: models.cut_awkward(models.awkward(), catalog.cyclic(2)),
    "exported": lambda: models.masked_stages(models.masked(), by_hand=False),
    "by hand": lambda: models.masked_stages(models.masked(), by_hand=True),
}


@pytest.mark.parametrize("case", CASES)
def test_stages_are_the_same_and_share_the_parameters_of_their_model(case):
    stages = CASES[case]()
    found = pickle.loads(dumps(stages))
    parameters = dict(found.model.named_parameters())
    assert found.boundaries == stages.boundaries
    assert found.outputs == stages.outputs
    for stage, expected in zip(found, stages, strict=True):
        assert stage.code == expected.code
        assert stage.meta == expected.meta
        assert stage.training == expected.training
        assert [*stage.state_dict()] == [*expected.state_dict()]
        for name, parameter in stage.named_parameters():
            assert parameter is parameters[name]
            assert torch.equal(parameter, expected.get_parameter(name))


def test_what_cannot_be_pickled_is_refused():
    with pytest.raises(UserError, match="lock"):
        dumps(threading.Lock())

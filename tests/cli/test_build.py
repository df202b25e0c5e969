"""From options to models: what they are called, and for which samples they are made."""

import pytest
from omegaconf import OmegaConf
from torch import nn

from toolkit.cli import analysed_form, build_model, model_name
from toolkit.errors import UserError
from toolkit.model import Images, Sequences

NAMED = {"_target_": "toolkit.model.build", "name": "resnet8", "target": None, "arguments": {}}
DECODER = {"_target_": "toolkit.model.gpt", "name": "gpt2", "target": None, "arguments": {}}
HERE = "tests.cli.test_build"
OWN = NAMED | {"target": f"{HERE}.anything"}


def anything(**options):
    """A model of the user that takes any option."""
    model = nn.Flatten()
    model.options = options
    return model


def test_the_samples_of_an_analysis_may_be_those_of_data():
    data = {"_target_": "toolkit.training.data.digits"}
    options = {"model": NAMED, "shape": None, "classes": None, "data": data}
    assert analysed_form(OmegaConf.create(options)) == Images(1, 8, 8, 10)
    with pytest.raises(UserError, match="shape and classes"):
        analysed_form(OmegaConf.create(options | {"classes": 10}))


def analysed(model, shape=None, classes=None):
    return analysed_form(OmegaConf.create({"model": model, "shape": shape, "classes": classes}))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (NAMED, "resnet8"),
        (DECODER, "gpt2"),
        (OWN, f"{HERE}.anything"),
        ({"_target_": f"{HERE}.anything"}, "anything"),
    ],
)
def test_what_a_model_is_called(options, expected):
    assert model_name(OmegaConf.create(options)) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((NAMED,), Images(3, 224, 224, 1000)),
        ((NAMED, [1, 8, 16], 7), Images(1, 8, 16, 7)),
        ((NAMED, [9]), Sequences(9, 50257)),
        ((DECODER,), Sequences(1024, 50257)),
        ((DECODER, None, 11), Sequences(1024, 11)),
        ((DECODER, [64], 11), Sequences(64, 11)),
        ((OWN,), Images(3, 224, 224, 1000)),
        ((OWN, [64]), Sequences(64, 50257)),
        (({"_target_": f"{HERE}.anything"},), Images(3, 224, 224, 1000)),
    ],
)
def test_the_samples_of_an_analysis(options, expected):
    assert analysed(*options) == expected


def test_a_model_of_the_user_gets_the_form():
    options = OmegaConf.create({"_target_": f"{HERE}.anything", "depth": 3})
    for form in (Images(3, 8, 8, 5), Sequences(6, 9)):
        assert build_model(options, form).options == form.arguments | {"depth": 3}


def plain(width, n_classes):
    """A user's model without sample sizes."""


def test_refuses_a_target_without_sample_sizes():
    options = OmegaConf.create({"_target_": f"{HERE}.plain", "width": 16, "n_classes": 10})
    with pytest.raises(UserError, match=rf"{HERE}.plain has no image_size, in_channels.* target "):
        build_model(options, Images(3, 8, 8, 10))


def test_refuses_arguments_of_a_target_that_is_not_given():
    options = OmegaConf.create(NAMED | {"arguments": {"depth": 3}})
    with pytest.raises(UserError, match=r"model.target: got depth for the model resnet8"):
        build_model(options, Images(3, 8, 8, 10))

"""From options to models: what they are called, and for which samples they are made."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from torch import nn

from toolkit.cli import analysed_form, build_model, chosen, model_name, schema
from toolkit.errors import UserError
from toolkit.files import conf
from toolkit.model import Features, Images, Sequences

NAMED = {
    "_target_": "toolkit.model.build",
    "name": "resnet8",
    "target": None,
    "arguments": {},
}
DECODER = {
    "_target_": "toolkit.model.gpt",
    "name": "gpt2",
    "target": None,
    "arguments": {},
}
HERE = "tests.cli.test_build"
OWN = NAMED | {"target": f"{HERE}.anything"}


def of_user(name):
    return NAMED | {"target": f"{HERE}.{name}"}


def anything(**options):
    """A model of the user that takes any option."""
    model = nn.Flatten()
    model.options = options
    return model


def mlp():
    return nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 5))


def decoder(vocabulary=7):
    return nn.Sequential(nn.Embedding(vocabulary, 4), nn.Linear(4, vocabulary))


def classifier():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6)
    )


def test_the_samples_of_an_analysis_may_be_those_of_data():
    data = {"_target_": "toolkit.training.data.digits"}
    options = {"model": NAMED, "shape": None, "classes": None, "data": data}
    assert analysed_form(OmegaConf.create(options)) == Images(1, 8, 8, 10)
    with pytest.raises(UserError, match="shape and classes"):
        analysed_form(OmegaConf.create(options | {"classes": 10}))


def analysed(model, shape=None, classes=None):
    return analysed_form(
        OmegaConf.create({"model": model, "shape": shape, "classes": classes})
    )


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
        ((of_user("mlp"), [64]), Features(64, 5)),
        ((of_user("mlp"), [64], 3), Features(64, 3)),
        ((of_user("mlp"), [63]), Sequences(63, 50257)),
        ((of_user("decoder"), [64]), Sequences(64, 7)),
        ((of_user("decoder"), [64], 9), Sequences(64, 9)),
        ((of_user("classifier"),), Images(3, 224, 224, 6)),
        ((of_user("classifier"), [3, 32, 16], 4), Images(3, 32, 16, 4)),
        ((of_user("classifier"), [1, 8, 8]), Images(1, 8, 8, 1000)),
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
    options = OmegaConf.create(
        {"_target_": f"{HERE}.plain", "width": 16, "n_classes": 10}
    )
    with pytest.raises(
        UserError, match=rf"{HERE}.plain has no image_size, in_channels.* target "
    ):
        build_model(options, Images(3, 8, 8, 10))


def test_refuses_arguments_of_a_target_that_is_not_given():
    options = OmegaConf.create(NAMED | {"arguments": {"depth": 3}})
    with pytest.raises(
        UserError, match=r"model.target: got depth for the model resnet8"
    ):
        build_model(options, Images(3, 8, 8, 10))


def chosen_by(*overrides):
    """The model and machines of a command line, as those of another one."""
    with initialize_config_dir(version_base="1.3", config_dir=str(conf())):
        config = compose("plan", [*overrides], return_hydra_config=True)
    HydraConfig.instance().set_config(config)
    return chosen("model", "hardware")


def test_chosen_options_leave_out_the_default_of_a_model_of_the_user():
    schema.register()
    assert chosen_by() == "model=resnet50 hardware=ethernet_10"
    assert chosen_by("model=gpt", "model.width=8", "ranks=2") == (
        "model=gpt hardware=ethernet_10 model.width=8"
    )
    arguments = "model.target=my_lab.net", "+model.arguments.width=8"
    assert chosen_by(*arguments) == f"hardware=ethernet_10 {' '.join(arguments)}"
    assert chosen_by("model=gpt", *arguments).startswith("model=gpt ")

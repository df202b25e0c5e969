"""What models take: examples that nothing else is drawn by."""

from functools import partial

import pytest
import torch

from toolkit.model import Features, Images, Sequences, build, gpt

FORMS = [Images(3, 8, 8, 5), Features(4, 5), Sequences(6, 9)]


def linear(n_classes, n_features):
    return torch.nn.Linear(n_features, n_classes)


MAKERS = {Images: partial(build, "resnet8"), Features: linear, Sequences: gpt}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.samples)
def test_a_model_that_is_told_gives_such_an_answer(form):
    model = MAKERS[type(form)](**form.arguments)
    assert model(form.example(2)).shape == form.output(2)
    assert form.output(2)[-1] == form.n_classes


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.samples)
def test_examples_are_always_the_same_and_draw_nothing(form):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = form.example(3), form.example(3)
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())
    assert len(first.unique()) > 3
    meta = form.example(3, "meta")
    assert (meta.device.type, meta.shape, meta.dtype) == (
        "meta",
        first.shape,
        first.dtype,
    )
    with torch.device("meta"):
        assert form.example(2).device.type == "cpu"
    assert form.example(2**40, "meta").numel() >= 2**40  # takes no memory
    assert Sequences(500, 4).example(2).unique().tolist() == [0, 1, 2, 3]

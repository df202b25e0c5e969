"""What models take: examples that nothing else is drawn by."""

import pytest
import torch

from toolkit.model import Images, Sequences, build, gpt

FORMS = [Images(3, 8, 8, 5), Sequences(6, 9)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.samples)
def test_a_model_that_is_told_gives_such_an_answer(form):
    arguments = form.arguments
    model = gpt(**arguments) if form.samples == "sequences" else build("resnet8", **arguments)
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
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", first.shape, first.dtype)


def test_tokens_are_of_the_vocabulary():
    example = Sequences(500, 4).example(2)
    assert sorted(example.unique().tolist()) == [0, 1, 2, 3]


def test_where_models_are_made_does_not_matter():
    with torch.device("meta"):
        assert Sequences(6, 9).example(2).device.type == "cpu"


def test_examples_on_the_meta_device_take_no_memory():
    for form in (Images(3, 2**20, 2**20, 5), Sequences(2**30, 9)):
        assert form.example(2**10, "meta").numel() >= 2**40

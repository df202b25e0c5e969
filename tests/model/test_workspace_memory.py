"""What stages need while they run, counted by hand."""

import gc

import pytest
import torch
from torch import nn

from toolkit.model import partition
from toolkit.model.analysis import Live, working_bytes

FLOAT = 4
GPU = torch.device("meta")


def linear(n_inputs, n_outputs):
    return nn.Linear(n_inputs, n_outputs, bias=False)


def of_model(*layers, images=None, precision="fp32"):
    images = torch.empty(8, 4, device="meta") if images is None else images
    (stage,) = partition(nn.Sequential(*layers).to("meta"), 1, images)
    return working_bytes(stage, (images,), GPU, precision)


def test_a_layer_makes_its_output_and_gets_its_gradient():
    """Neither is kept for the backward; which makes the gradient of the weights beside."""
    output, weights = FLOAT * 8 * 16, FLOAT * 4 * 16
    assert of_model(linear(4, 16)) == (output, output + weights)
    assert of_model(linear(4, 16).requires_grad_(False)) == (output, 0)
    images = torch.empty(8, 4, device="meta", requires_grad=True)
    assert of_model(linear(4, 16), images=images) == (output, output + weights + images.nbytes)


def test_what_is_kept_is_not_among_it_and_goes_as_the_backward_does():
    """ReLU keeps its output, 8 x 16, which is the next layer's input: the layer before makes it."""
    hidden, output = FLOAT * 8 * 16, FLOAT * 8 * 2
    first, second = FLOAT * 4 * 16, FLOAT * 16 * 2
    forward, backward = of_model(linear(4, 16), nn.ReLU(), linear(16, 2))
    assert forward == hidden  # ReLU's input, beside its output
    # At the end of ReLU's backward: gradients of its output and input, and of the second weights.
    assert backward == output + 2 * hidden + second
    assert first < hidden


def test_in_16_bits_it_is_less():
    plain, half = (
        of_model(linear(4, 16), nn.ReLU(), linear(16, 16), precision=precision)[1]
        for precision in ("fp32", "bf16")
    )
    assert half < 0.7 * plain


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_of_what_is_alive(device):
    outside = torch.empty(100, device=device)
    with Live() as live:
        first = torch.empty(10, device=device)
        view = first[:5]
        second = first + 1
        assert (live.bytes, live.most) == (80, 80)
        outside.add_(1)
        assert live.bytes == 80
        del first
        assert live.bytes == 80  # the view keeps it
        del view
        gc.collect()
        assert (live.bytes, live.most) == (40, 80)
    assert second.shape == (10,)

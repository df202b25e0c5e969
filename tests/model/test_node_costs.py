"""Costs of single operations equal the hand count."""

import copy
import gc

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from toolkit.model import partition
from toolkit.model.node_costs import meta_copy, node_costs
from toolkit.model.peak_memory import LiveMemory, working_bytes

FLOAT = 4


def costs(model, *shape):
    return node_costs(fx.symbolic_trace(model), (torch.empty(*shape, device="meta"),))


@pytest.mark.parametrize(
    ("layer", "shape", "flops", "parameters"),
    [
        (nn.Linear(5, 7), (3, 5), 2 * 3 * 5 * 7, 5 * 7 + 7),
        (nn.Linear(5, 7, bias=False), (3, 5), 2 * 3 * 5 * 7, 5 * 7),
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 6, 6), 2 * 2 * 36 * 8 * 27, 8 * 27 + 8),
        (
            nn.Conv2d(4, 8, 3, stride=2, groups=2, bias=False),
            (1, 4, 7, 7),
            2 * 9 * 8 * 18,
            8 * 18,
        ),
        (nn.ReLU(), (2, 3), 0, 0),
        (nn.BatchNorm2d(3), (2, 3, 4, 4), 0, 6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_known_layers(layer, shape, flops, parameters):
    cost = costs(nn.Sequential(layer), *shape)["_0"]
    assert (cost.flops, cost.parameters) == (flops, parameters)
    assert cost.output.device.type == "meta"
    assert cost.output.shape == layer(torch.zeros(shape)).shape


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 4, 3, padding=1), (2, 6, 5, 5)),
        (nn.Conv2d(6, 4, 3, stride=2, groups=2), (2, 6, 7, 7)),
        (nn.Conv2d(6, 6, 3, groups=6), (2, 6, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2), (2, 6, 5, 5)),
        (nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2), (2, 6, 5, 5)),
        (nn.Conv1d(6, 4, 3, groups=2), (2, 6, 9)),
    ],
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_convolutions_gradients_take_its_forward_each(layer, shape, frozen):
    """That of its input and that of its weight, if wanted, whatever its groups."""
    # Its input needs a gradient.
    model = nn.Sequential(nn.PReLU(), copy.deepcopy(layer))
    model[1].weight.requires_grad_(not frozen)
    cost = costs(model, *shape)["_1"]
    assert cost.forward.flops > 0
    assert cost.backward.flops == cost.forward.flops * (1 if frozen else 2)


def test_activations_are_neither_parameters_nor_inputs_and_shared_storage_counts_once():
    model = nn.Sequential(
        nn.Linear(5, 7), nn.Flatten(), nn.Linear(7, 7), nn.ReLU(), nn.ReLU()
    )
    found = costs(model, 3, 5)
    assert [found[f"_{k}"].activations for k in range(5)] == [
        0,  # keeps the model's input and its own weight
        0,  # a view
        3 * 7 * FLOAT,  # keeps its input
        3 * 7 * FLOAT,  # keeps its output
        3 * 7 * FLOAT,
    ]


def test_tied_parameters_count_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(self.encode(x)) + F.linear(x, self.encode.weight)

    assert sum(cost.parameters for cost in costs(Tied(), 2, 4).values()) == 4 * 4 + 4


def test_in_place_changes_are_seen_through_views():
    class InPlace(nn.Module):
        def forward(self, x):
            y = x + 1
            flat = y.flatten()
            z = F.relu(flat, True)
            z.add_(1)
            return torch.relu_(z * 2)

    found = costs(InPlace(), 2, 3)
    changes = {name: set(cost.changes) for name, cost in found.items() if cost.changes}
    assert changes == {
        "relu": {"add", "flatten"},
        "add_": {"add", "flatten", "relu"},
        "relu_": {"mul"},
    }


def test_nothing_is_allocated_and_the_model_stays():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    weight = model[0].weight
    twin = meta_copy(model)
    assert all(tensor.is_meta for tensor in twin.state_dict().values())
    assert twin.training
    assert model[0].weight is weight
    assert not model.training
    costs(model, 2**36, 4)  # a terabyte


# Workspace: what stages need while they run, counted by hand


def linear(n_inputs, n_outputs):
    return nn.Linear(n_inputs, n_outputs, bias=False)


def of_model(*layers, images=None, precision="fp32"):
    images = torch.empty(8, 4, device="meta") if images is None else images
    (stage,) = partition(nn.Sequential(*layers).to("meta"), 1, images)
    return working_bytes(stage, (images,), torch.device("meta"), precision)


def test_a_layer_makes_its_output_and_gets_its_gradient():
    """Neither is kept for the backward; which makes the gradient of the weights beside."""
    output, weights = FLOAT * 8 * 16, FLOAT * 4 * 16
    assert of_model(linear(4, 16)) == (output, output + weights)
    assert of_model(linear(4, 16).requires_grad_(False)) == (output, 0)
    images = torch.empty(8, 4, device="meta", requires_grad=True)
    assert of_model(linear(4, 16), images=images) == (
        output,
        output + weights + images.nbytes,
    )


def test_what_is_kept_is_not_among_it_and_goes_as_the_backward_does():
    """ReLU keeps its output, 8 x 16, which is the next layer's input: the layer before makes it."""
    hidden, output = FLOAT * 8 * 16, FLOAT * 8 * 2
    first, second = FLOAT * 4 * 16, FLOAT * 16 * 2
    forward, backward = of_model(linear(4, 16), nn.ReLU(), linear(16, 2))
    assert forward == hidden  # ReLU's input, beside its output
    # At the end of ReLU's backward: gradients of its output and input, and of the second weights.
    assert backward == output + 2 * hidden + second
    assert first < hidden


def test_workspace_in_16_bits_is_less():
    layers = linear(4, 16), nn.ReLU(), linear(16, 16)
    plain, half = (
        of_model(*layers, precision=precision)[1] for precision in ("fp32", "bf16")
    )
    assert half < 0.7 * plain


def test_bytes_of_living_tensors():
    outside = torch.empty(100, device="meta")
    with LiveMemory() as live:
        first = torch.empty(10, device="meta")
        view = first[:5]
        second = first + 1
        assert (live.bytes, live.most) == (80, 80)
        outside.add_(1)
        del first
        assert live.bytes == 80  # the view keeps it
        del view
        gc.collect()
        assert (live.bytes, live.most) == (40, 80)
    assert second.shape == (10,)

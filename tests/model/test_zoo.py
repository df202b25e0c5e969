"""The zoo is torchvision's where images are large, and fitted where they are small."""

import pytest
import torch
import torchvision
from torch import nn

from toolkit.errors import UserError
from toolkit.model import MODELS, build
from toolkit.model.zoo import whitening


@pytest.fixture(autouse=True)
def _on_meta():
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16"])
def test_large_images_get_the_model_of_torchvision(name):
    ours, theirs = build(name), getattr(torchvision.models, name)()
    shapes = {k: v.shape for k, v in theirs.state_dict().items()}
    assert {k: v.shape for k, v in ours.state_dict().items()} == shapes


@pytest.mark.parametrize(("size", "small"), [(64, True), (65, False)])
def test_small_images_get_the_small_stem(size, small):
    model = build("resnet18", 10, size)
    stem = (3, 3), (1, 1), True
    assert (
        model.conv1.kernel_size, model.conv1.stride, isinstance(model.maxpool, nn.Identity)
    ) == (stem if small else ((7, 7), (2, 2), False))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers", "parameters"),
    [
        ("resnet6", 6, 74_138),
        ("resnet8", 8, 78_042),
        ("resnet14", 14, 175_258),
        ("resnet20", 20, 272_474),
    ],
)
def test_depth_of_the_small_residual_nets(name, layers, parameters):
    model = build(name, 10, 32)
    weighted = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    shortcuts = [m for m in weighted if getattr(m, "kernel_size", None) == (1, 1)]
    assert len(weighted) - len(shortcuts) == layers
    assert len(shortcuts) == 2
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("in_channels", "size"), [(1, 32), (4, 96)])
def test_takes_any_channels_and_gives_any_classes(name, in_channels, size):
    model = build(name, 7, size, in_channels)
    assert model(torch.empty(2, in_channels, size, size)).shape == (2, 7)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (("resnet19",), "'resnet19'.* resnet18.* resnet8, .*vit_b_16"),
        (("vit_b_16", 10, 32, 3, 8), "width.* 8"),
        (("resnet18", 10, 32, 3, 0), "width.* 0"),
        (("resnet18", 0), "n_classes.* 0"),
        (("vit_b_16", 10, 30), "16 .* 30"),
        (("convnet", 10, 8), "16 .* 8"),
    ],
)
def test_rejects(arguments, value):
    with pytest.raises(UserError, match=value):
        build(*arguments)


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("resnet")])
def test_width_scales_every_layer(name):
    usual = build(name, 10, 32)
    scaled = build(name, 10, 32, width=usual.conv1.out_channels // 4)
    ends = {"conv1.weight": 1, "fc.weight": 0}  # the axis that images and classes fix
    for key, value in usual.state_dict().items():
        fixed = ends.get(key, {"fc.bias": 0}.get(key))
        expected = [
            n if axis == fixed or (value.dim() == 4 and axis > 1) else n // 4
            for axis, n in enumerate(value.shape)
        ]
        assert list(scaled.state_dict()[key].shape) == expected, key
    assert scaled(torch.empty(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: build("resnet18"), torchvision.models.resnet18),
        (lambda: build("resnet18", width=64), torchvision.models.resnet18),
        (lambda: build("resnet8", 10, 32), lambda: build("resnet8", 10, 32, width=16)),
    ],
)
def test_the_usual_width_draws_the_usual_weights(one, other):
    states = []
    for make in (one, other):
        with torch.device("cpu"):
            torch.manual_seed(0)
            states.append(make().state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_another_width_is_initialised_alike():
    """He et al., by the number of outputs: so the standard deviation is sqrt(2 / fan)."""
    with torch.device("cpu"):
        model = build("resnet18", 10, 96, width=16)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                fan = module.out_channels * module.kernel_size[0] ** 2
                found = float(module.weight.detach().std())
                assert found == pytest.approx((2 / fan) ** 0.5, rel=0.2), name
            if isinstance(module, nn.BatchNorm2d):
                assert torch.equal(module.weight, torch.ones(module.num_features))


@pytest.mark.parametrize("channels", [1, 3])
def test_convnet_whitens_patches(channels):
    """Of images whose neighbours and channels correlate as in natural ones, all features alike."""
    with torch.device("cpu"):
        filters = whitening(channels).flatten(1)
        near, across = torch.full((2, 2), 0.94), torch.full((channels, channels), 0.93)
        near.fill_diagonal_(1)
        across.fill_diagonal_(1)
        covariance = torch.kron(across, torch.kron(near, near))
        found = filters @ covariance @ filters.T
        half = 4 * channels
        torch.testing.assert_close(found[:half, :half], found[half:, half:])
        torch.testing.assert_close(found[:half, :half], -found[half:, :half])
        off_diagonal = found[:half, :half] - torch.diag(found.diagonal()[:half])
        assert off_diagonal.abs().max() < 1e-4
        assert 0 < found.diagonal().max() <= 1


def test_convnet_begins_by_passing_on():
    with torch.device("cpu"):
        model = build("convnet", 10, 32, width=8)
        weight = model.conv2_1.weight  # of 8 channels to 32
        assert torch.equal(weight[:8], nn.init.dirac_(torch.empty(8, 8, 3, 3)))
        assert weight[8:].std() > 0
        assert not model.whiten.weight.requires_grad
        assert model.whiten.bias.requires_grad

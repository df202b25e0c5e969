"""Image classifiers for a data set's image size: torchvision's, and CIFAR's small ResNets."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from toolkit.errors import UserError, suggest, whole

_SMALL_IMAGE = 64  # pixels; up to here ResNets keep their resolution through the stem
_WIDTH = 64  # of torchvision's ResNets
_LEAST_FOR_CONVNET = 16  # pixels, which it halves four times


def build(
    name: str,
    n_classes: int = 1000,
    image_size: int = 224,
    in_channels: int = 3,
    width: int | None = None,
) -> nn.Module:
    """Return a classifier with random weights from torch's global generator.

    ``resnet18`` and ``resnet50`` get the CIFAR stem (3x3 convolution, no max-pool) for images of at
    most 64 pixels. ``resnet8``, ``resnet14`` and ``resnet20`` (He et al., arXiv 1512.03385,
    section 4.2) are 16 to 64 channels wide. ``resnet6`` halves the resolution in its stem, a 5x5
    convolution, and has no first group: a fifth of the FLOPs of ``resnet8``. ``convnet`` is made
    for short trainings (Jordan, arXiv 2404.00498): a fixed layer that whitens patches, and three
    pairs of convolutions of 64, 256 and 256 channels, for images of at least 16 pixels.

    Args:
        name: one of :data:`MODELS`.
        n_classes: width of the output.
        image_size: height and width of the images, in pixels.
        in_channels: channels of the images.
        width: channels of the first layers that are trained; scales all others. None: 64, of
            small ResNets 16.

    Raises:
        UserError: unknown name, or images or a width that the model cannot take.
    """
    if name not in MODELS:
        raise UserError(f"unknown model {name!r}: {suggest(name, [*MODELS])}")
    sizes = {
        "n_classes": n_classes,
        "image_size": image_size,
        "in_channels": in_channels,
    }
    for size_name, value in (sizes | {"width": 1 if width is None else width}).items():
        whole(value, f"model.{size_name}", 1)
    return MODELS[name](n_classes, image_size, in_channels, width)


# torchvision is imported lazily: it is slow to load, and ranks that receive a model skip it.


def _resnet(
    name: str, n_classes: int, image_size: int, in_channels: int, width: int | None
) -> nn.Module:
    """Return torchvision's ResNet of any width; with CIFAR's stem for small images."""
    from torchvision.models import get_model

    width = _WIDTH if width is None else width
    if width == _WIDTH:
        model = get_model(name, num_classes=n_classes)
    else:  # torchvision has no argument for it
        with torch.device("meta"):  # every layer with weights is replaced below
            model = get_model(name, num_classes=n_classes)
        model.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        model.bn1 = nn.BatchNorm2d(width)
        model.inplanes = width
        for group in range(4):
            # The same kind and number of blocks, by torchvision's own function, which reads
            # `inplanes`.
            old_layer = getattr(model, f"layer{group + 1}")
            layer = model._make_layer(
                type(old_layer[0]),
                width * 2**group,
                len(old_layer),
                stride=2 if group else 1,
            )
            setattr(model, f"layer{group + 1}", layer)
        model.fc = nn.Linear(model.inplanes, n_classes)
        _initialise(model)
    is_small_image = image_size <= _SMALL_IMAGE
    if is_small_image or in_channels != 3:
        kernel, stride = (3, 1) if is_small_image else (7, 2)
        model.conv1 = nn.Conv2d(
            in_channels, width, kernel, stride, kernel // 2, bias=False
        )
        _initialise(model.conv1)
    if is_small_image:
        model.maxpool = nn.Identity()
    return model


def _initialise(model: nn.Module) -> None:
    """Draw the weights of convolutions (He et al., arXiv 1502.01852)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _cifar_resnet(
    blocks: tuple[int, int, int],
    n_classes: int,
    image_size: int,
    in_channels: int,
    width: int | None,
) -> nn.Module:
    """Return three groups of two-layer blocks, of ``width`` (16), 2x and 4x channels.

    If the first group is empty, the stem is 5x5 and halves the resolution.
    """
    base_width = 16 if width is None else width
    kernel, stride = (3, 1) if blocks[0] else (5, 2)
    conv = nn.Conv2d(in_channels, base_width, kernel, stride, kernel // 2, bias=False)
    layers = OrderedDict(
        conv1=conv, bn1=nn.BatchNorm2d(base_width), relu=nn.ReLU(inplace=True)
    )
    narrower = base_width
    for group, wider in enumerate((base_width, 2 * base_width, 4 * base_width)):
        for block in range(blocks[group]):
            stride = 2 if group and not block else 1
            layers[f"layer{group + 1}_{block}"] = _block(narrower, wider, stride)
            narrower = wider
    fc = nn.Linear(narrower, n_classes)
    layers |= {"avgpool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": fc}
    model = nn.Sequential(layers)
    _initialise(model)
    return model


def _block(narrower: int, wider: int, stride: int) -> nn.Module:
    """Return a block of two layers, with a projection as shortcut where shapes change."""
    from torchvision.models.resnet import BasicBlock

    if stride == 1 and narrower == wider:
        return BasicBlock(narrower, wider)
    # Option B of the paper, a projection; its CIFAR nets pad with zeros instead (option A).
    shortcut = nn.Conv2d(narrower, wider, 1, stride, bias=False)
    return BasicBlock(
        narrower, wider, stride, nn.Sequential(shortcut, nn.BatchNorm2d(wider))
    )


def _convnet(
    n_classes: int, image_size: int, in_channels: int, width: int | None
) -> nn.Module:
    if image_size < _LEAST_FOR_CONVNET:
        raise UserError(
            f"convnet needs images of {_LEAST_FOR_CONVNET} pixels or more: got {image_size}"
        )
    base_width = width or _WIDTH
    filters = whitening(in_channels)
    conv = nn.Conv2d(in_channels, len(filters), 2)
    conv.load_state_dict({"weight": filters, "bias": torch.zeros(len(filters))})
    conv.weight.requires_grad_(False)
    layers: OrderedDict[str, nn.Module] = OrderedDict(whiten=conv, gelu=nn.GELU())
    narrower = len(filters)
    for group, wider in enumerate(
        (base_width, 4 * base_width, 4 * base_width), start=1
    ):
        # Each group: convolution, pooling, norm, GELU; then convolution, norm, GELU.
        for position, channels in enumerate((narrower, wider), start=1):
            layers[f"conv{group}_{position}"] = conv = nn.Conv2d(
                channels, wider, 3, 1, 1, bias=False
            )
            # Passes on what it gets; the rest is random.
            nn.init.dirac_(conv.weight[:channels])
            if position == 1:
                layers[f"pool{group}"] = nn.MaxPool2d(2)
            layers[f"bn{group}_{position}"] = nn.BatchNorm2d(wider)
            layers[f"gelu{group}_{position}"] = nn.GELU()
        narrower = wider
    pool = nn.AdaptiveMaxPool2d(1)
    layers |= {
        "pool": pool,
        "flatten": nn.Flatten(),
        "fc": nn.Linear(narrower, n_classes),
    }
    # The factor on the scores of arXiv 2404.00498.
    layers["scale"] = _Scale(1 / 9)
    return nn.Sequential(layers)


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def whitening(in_channels: int) -> torch.Tensor:
    """Return filters ``[8 * in_channels, in_channels, 2, 2]`` that decorrelate image patches.

    The eigenvectors of a patch's covariance, scaled to unit variance, and their negatives. Instead
    of a data set's covariance: neighbours correlate by 0.94, channels by 0.93.
    """
    neighbours = torch.full((2, 2), 0.94)
    channels = torch.full((in_channels, in_channels), 0.93)
    for correlation in (neighbours, channels):
        correlation.fill_diagonal_(1.0)
    # The correlation of two values of a patch is the product of those by channel, row and column.
    variances, vectors = torch.linalg.eigh(
        torch.kron(channels, torch.kron(neighbours, neighbours))
    )
    # Plus 0.01, or directions with hardly any variance would be blown up.
    filters = (vectors / torch.sqrt(variances + 0.01)).T.reshape(-1, in_channels, 2, 2)
    return torch.cat([filters, -filters])


def _vit(
    n_classes: int, image_size: int, in_channels: int, width: int | None
) -> nn.Module:
    if width is not None:
        raise UserError(f"vit_b_16 takes no model.width: got {width}; leave it out")
    patch = 16
    if image_size % patch:
        raise UserError(
            f"vit_b_16 needs images of a multiple of {patch} pixels: got {image_size}"
        )
    from torchvision.models import vit_b_16

    model = vit_b_16(image_size=image_size, num_classes=n_classes)
    if in_channels != 3:
        model.conv_proj = nn.Conv2d(in_channels, model.hidden_dim, patch, patch)
    return model


MODELS: dict[str, Callable[[int, int, int, int | None], nn.Module]] = {
    "resnet6": partial(_cifar_resnet, (0, 1, 1)),
    "resnet8": partial(_cifar_resnet, (1, 1, 1)),
    "resnet14": partial(_cifar_resnet, (2, 2, 2)),
    "resnet20": partial(_cifar_resnet, (3, 3, 3)),
    "resnet18": partial(_resnet, "resnet18"),
    "resnet50": partial(_resnet, "resnet50"),
    "convnet": _convnet,
    "vit_b_16": _vit,
}
"""Factories of :func:`build` by name."""

"""The user's images or text, as a pilot takes them."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.training.data import Batch
from toolkit.training.data.batches import shuffled
from toolkit.training.loop import evaluated_at_once

_MOST = 2048  # images of a data set of the user's own that are read
_TESTED = 5  # one image in so many is kept for the test


@dataclass(frozen=True)
class Data:
    """Batches for training and for the test.

    Attributes:
        epoch: the batches of one epoch, by seed and epoch; all of the same size.
        test: the samples that are not trained on.
        labelled: whether their classes are known, and not made up.
        n_tested: how many samples the test has.
        n_classes: how many classes the labels name.
        samples: what they are called.
    """

    epoch: Callable[[int, int], Iterable[Batch]]
    test: Callable[[], Iterable[Batch]]
    labelled: bool
    n_tested: int
    n_classes: int
    samples: str = "images"

    def train(self, seed: int) -> Iterator[Batch]:
        """Batches for ever, epoch after epoch."""
        for epoch in count():
            yield from self.epoch(seed, epoch)


def read(
    images: Any, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Data:
    """The user's data as batches of ``batch_size`` on ``device``, images in ``dtype``.

    Args:
        images: a set of :mod:`toolkit.training.data`, of text, too; images and their classes,
            ``(Tensor [n, channels, height, width], Tensor [n])``; images alone; or a data set
            that gives one such pair an index, of which 2048 drawn at random are taken.

    Raises:
        ValueError: it is something else, or has fewer images than a training step takes.
    """
    if hasattr(images, "train") and hasattr(images, "test"):
        first = images.train(batch_size, 0, 0, device)
        n_tested = sum(len(labels) for _, labels in images.test(batch_size, device))
        if len(first) == 0:
            raise UserError(_too_few(batch_size, "fewer"))
        return Data(
            lambda seed, epoch: _cast(images.train(batch_size, seed, epoch, device), dtype),
            lambda: _cast(images.test(evaluated_at_once(images.form, batch_size), device), dtype),
            True,
            n_tested,
            images.form.n_classes,
            images.form.samples,
        )
    pixels, labels = _tensors(images)
    if len(pixels) < batch_size:
        raise UserError(_too_few(batch_size, f"{len(pixels)}"))
    labelled = labels is not None
    if labels is None:
        labels = torch.zeros(len(pixels), dtype=torch.long)
    return _split(pixels.to(device, dtype), labels.to(device), labelled, batch_size)


def _cast(batches: Iterable[Batch], dtype: torch.dtype) -> Iterator[Batch]:
    for inputs, labels in batches:
        yield inputs.to(dtype) if inputs.is_floating_point() else inputs, labels


def _too_few(batch_size: int, n: str) -> str:
    return (
        f"a training step takes {batch_size} images (n_workers times batch) and there are {n}:"
        " give more images, or make batch smaller"
    )


def _split(pixels: Tensor, labels: Tensor, labelled: bool, batch_size: int) -> Data:
    """A fifth of the images for the test, if that leaves enough to train on."""
    n_tested = min(len(pixels) // _TESTED, len(pixels) - batch_size)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    held, kept = order[:n_tested].to(pixels.device), order[n_tested:]

    def epoch(seed: int, number: int) -> list[Batch]:
        mixed, _ = shuffled(len(kept), batch_size, seed, number, "images")
        chosen = kept[mixed].to(pixels.device)
        parts = chosen[: len(kept) // batch_size * batch_size].split(batch_size)
        return [(pixels[part], labels[part]) for part in parts]

    def test() -> list[Batch]:
        return [(pixels[part], labels[part]) for part in held.split(256) if len(part)]

    return Data(epoch, test, labelled, n_tested, int(labels.max()) + 1)


def _tensors(images: Any) -> tuple[Tensor, Tensor | None]:
    """Pixels as floats, and classes where there are any."""
    if isinstance(images, Tensor):
        return _pixels(images), None
    if isinstance(images, tuple | list) and len(images) == 2 and _are_tensors(images):
        pixels, labels = images
        if labels.dim() != 1 or len(labels) != len(pixels) or labels.is_floating_point():
            raise UserError(
                f"classes are whole numbers, one an image: got shape {list(labels.shape)} and"
                f" {labels.dtype} for {len(pixels)} images; {_TEXT}"
            )
        if len(labels) and labels.min() < 0:
            raise UserError(f"classes are numbered from 0: got {int(labels.min())}")
        return _pixels(pixels), labels.long()
    if hasattr(images, "__getitem__") and hasattr(images, "__len__") and not _are_tensors(images):
        pairs = [_pair(images[k]) for k in _some(len(images))]
        if pairs:
            if len({pixels.shape for pixels, _ in pairs}) > 1:
                raise UserError("images of one size are needed: resize them in the data set")
            return _tensors(
                (torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs]))
            )
    raise UserError(
        f"images are a tensor [n, channels, height, width], such a tensor with its classes [n], a"
        f" data set of (image, class), or a set of toolkit.training.data: got a"
        f" {type(images).__name__}"
    )


def _some(n: int) -> list[int]:
    """Which images are read: of a folder of classes the first ones would be of one class."""
    return sorted(random.Random(0).sample(range(n), min(_MOST, n)))


def _are_tensors(images: Any) -> bool:
    return isinstance(images, tuple | list) and all(isinstance(x, Tensor) for x in images)


def _pixels(images: Tensor) -> Tensor:
    if images.dim() < 2:
        raise UserError(f"images have shape [n, channels, height, width]: got {list(images.shape)}")
    if images.dtype not in (torch.uint8, *_FLOATS):
        raise UserError(f"images are floats or bytes: got {images.dtype}; {_TEXT}")
    return images if images.is_floating_point() else images.float() / 255


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TEXT = "text is given as a set of toolkit.training.data: text(), token_files() or Tokens"


def _pair(item: Any) -> tuple[Tensor, int]:
    if isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], Tensor):
        if isinstance(item[1], Tensor) and item[1].numel() != 1:
            raise UserError(f"a class is one number: got shape {list(item[1].shape)}; {_TEXT}")
        return item[0], int(item[1])
    raise UserError(
        f"a data set gives (image as a tensor, class): got a {type(item).__name__}; add a transform"
        " such as torchvision.transforms.ToTensor()"
    )

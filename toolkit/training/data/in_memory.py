"""Small image sets: bytes on the training device, augmented there a batch at a time."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.model.input_spec import Images
from toolkit.training.data.batches import Source, SourceSet, send
from toolkit.training.data.sample_set import Batch


@dataclass(frozen=True)
class Labelled:
    """Images and their classes.

    Attributes:
        images: bytes ``[n, channels, height, width]``.
        labels: numbers of classes ``[n]``.
    """

    images: Tensor
    labels: Tensor


class InMemory(SourceSet):
    """An image set held as bytes on the training device; augmented and normalised there.

    Args:
        train, test: the images.
        n_classes: number of classes.
        mean, std: mean and standard deviation of each channel, black being 0 and white 1.
        crop_padding: pixels by which training images are padded before a random crop.
        flip: whether training images are mirrored at random.
        damaged: paths of damaged images that others of their classes replace.
    """

    def __init__(
        self,
        train: Labelled,
        test: Labelled,
        n_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop_padding: int = 0,
        flip: bool = False,
        damaged: Sequence[str] = (),
    ) -> None:
        self.damaged = tuple(damaged)
        normalise = Normalise(mean, std)
        channels, height, width = train.images.shape[1:]
        super().__init__(
            _Images(OnDevices(train.images, train.labels), normalise, crop_padding, flip),
            _Images(OnDevices(test.images, test.labels), normalise, crop_padding, flip),
            Images(channels, height, width, n_classes),
        )


class OnDevices:
    """Tensors, moved to each device once."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the tensors on ``device``."""
        if device not in self._copies:
            self._copies[device] = tuple(tensor.to(device) for tensor in self.tensors)
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        # Another process may have no such device.
        return {**self.__dict__, "_copies": {}}


class Normalise:
    """Bytes ``[n, channels, height, width]`` to normalised floats, on the bytes' device.

    Args:
        mean, std: mean and standard deviation of each channel, black being 0 and white 1.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._constants = OnDevices(*(torch.tensor(c).view(1, -1, 1, 1) for c in (mean, std)))

    def __call__(self, pixels: Tensor) -> Tensor:
        """Return ``[n, channels, height, width]`` as normalised floats."""
        mean, std = self._constants.on(pixels.device)
        return pixels.float().div_(255).sub_(mean).div_(std)


@dataclass(frozen=True)
class _Images(Source):
    """The training or the test images."""

    held: OnDevices
    normalise: Normalise
    crop_padding: int
    flip: bool

    def __len__(self) -> int:
        return len(self.held.tensors[1])

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return ``[3, n]``: the crop's first row and column in the padded image, and the flip."""
        padding = self.crop_padding
        corners = torch.full((2, n), padding)
        mirrored = torch.zeros(1, n, dtype=torch.long)
        if generator is not None and padding:
            corners = torch.randint(2 * padding + 1, (2, n), generator=generator)
        if generator is not None and self.flip:
            mirrored = (torch.rand(1, n, generator=generator) < 0.5).long()
        return torch.cat([corners, mirrored])

    def read(
        self, batches: Iterable[tuple[Tensor, Tensor]], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        images, labels = self.held.on(device)
        for chosen, drawn in batches:
            # One transfer for the numbers and the augmentation of a whole batch.
            there = send(torch.cat([chosen[None], drawn]), device)
            yield self._augmented(images, *there), labels[there[0]]

    def _augmented(
        self, images: Tensor, chosen: Tensor, top: Tensor, left: Tensor, mirrored: Tensor
    ) -> Tensor:
        if not self.crop_padding and not self.flip:
            return self.normalise(images[chosen])
        height, width = images.shape[2:]
        down, across = (torch.arange(size, device=images.device) for size in (height, width))
        rows = down + top[:, None] - self.crop_padding
        across = torch.where(mirrored[:, None] > 0, across.flip(0), across)
        columns = across + left[:, None] - self.crop_padding
        at_rows = rows.clamp(0, height - 1)[:, :, None]
        at_columns = columns.clamp(0, width - 1)[:, None, :]
        pixels = images[chosen[:, None, None], :, at_rows, at_columns]
        x = self.normalise(pixels.permute(0, 3, 1, 2).contiguous())
        if self.crop_padding:
            inside = (rows[:, :, None] == at_rows) & (columns[:, None, :] == at_columns)
            x = torch.where(inside[:, None], x, 0.0)
        return x

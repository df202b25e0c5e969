"""Small image sets: bytes on the training device, augmented there a batch at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.model.input_spec import Images
from toolkit.training.data.batches import HeldBatches, shuffled
from toolkit.training.data.normalize import Normalise, Placed, send
from toolkit.training.data.sample_set import Batch, Batches


@dataclass(frozen=True)
class Labelled:
    """Images ``[n, channels, size, size]`` of bytes, and their classes ``[n]``."""

    images: Tensor
    labels: Tensor


class InMemory:
    """An image set held as bytes on the training device; augmented and normalised there.

    Args:
        train, test: the images.
        n_classes: how many there are.
        mean, std: of each channel, black being 0 and white 1.
        crop_padding: training images are padded by as many pixels and cropped at random.
        flip: training images are mirrored at random.
        damaged: paths of images for which others of their classes stand in.
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
        self._n_train, self._n_test = len(train.labels), len(test.labels)
        augment = _Augment(Normalise(mean, std), crop_padding, flip)
        self._train = _Images(augment, Placed(train.images, train.labels))
        self._test = _Images(augment, Placed(test.images, test.labels))
        channels, height, width = train.images.shape[1:]
        self.form = Images(channels, height, width, n_classes)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        order, generator = shuffled(self._n_train, batch_size, seed, epoch, self.form.samples)
        return HeldBatches(self._train, order, batch_size, device, generator)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(self._n_test)[rank::n_ranks]
        return HeldBatches(self._test, order, batch_size, device, None)


@dataclass(frozen=True)
class _Augment:
    """How images become what a model sees."""

    normalise: Normalise
    crop_padding: int
    flip: bool

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """How each of ``n`` images is augmented.

        Returns:
            ``[3, n]``: the row and the column of the padded image at which the crop begins, and 1
            where it is mirrored.
        """
        padding = self.crop_padding
        corners = torch.full((2, n), padding)
        mirrored = torch.zeros(1, n, dtype=torch.long)
        if generator is not None and padding:
            corners = torch.randint(2 * padding + 1, (2, n), generator=generator)
        if generator is not None and self.flip:
            mirrored = (torch.rand(1, n, generator=generator) < 0.5).long()
        return torch.cat([corners, mirrored])

    def cut(self, images: Tensor, chosen: Tensor, drawn: Tensor) -> Tensor:
        """Normalised floats of the ``chosen`` images, augmented as ``drawn``; all on one device."""
        if not self.crop_padding and not self.flip:
            return self.normalise(images[chosen])
        height, width = images.shape[2:]
        top, left, mirrored = drawn[:, :, None]
        down, across = (torch.arange(size, device=images.device) for size in (height, width))
        rows = down + top - self.crop_padding
        columns = torch.where(mirrored > 0, across.flip(0), across) + left - self.crop_padding
        each = chosen[:, None, None]
        at_rows = rows.clamp(0, height - 1)[:, :, None]
        at_columns = columns.clamp(0, width - 1)[:, None, :]
        x = self.normalise(images[each, :, at_rows, at_columns].permute(0, 3, 1, 2).contiguous())
        if self.crop_padding:
            inside = (rows == rows.clamp(0, height - 1))[:, None, :, None]
            inside = inside & (columns == columns.clamp(0, width - 1))[:, None, None, :]
            x = torch.where(inside, x, 0.0)
        return x


@dataclass(frozen=True)
class _Images:
    """The training or the test images of a set."""

    augment: _Augment
    placed: Placed

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self.augment.draw(n, generator)

    def take(self, chosen: Tensor, drawn: Tensor, device: torch.device) -> Batch:
        pixels, labels = self.placed.on(device)
        there = send(torch.cat([chosen[None], drawn]), device)
        return self.augment.cut(pixels, there[0], there[1:]), labels[there[0]]

"""Small image sets: bytes on the training device, augmented there a batch at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.training.data.images import Batch, Batches
from toolkit.training.data.parts import Rows, Wanted, all_rows, rows_of
from toolkit.training.data.pixels import Normalise, Placed, send


@dataclass(frozen=True)
class Labelled:
    """Images ``[n, channels, size, size]`` of bytes, and their classes ``[n]``."""

    images: Tensor
    labels: Tensor


class InMemory:
    """An image set held as bytes on the training device; augmented and normalised there.

    What is drawn at random is drawn on the CPU, so that every device sees the same images.

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
        self._train = Placed(train.images, train.labels)
        self._test = Placed(test.images, test.labels)
        self.n_classes = n_classes
        self.in_channels, self.image_size = train.images.shape[1:3]
        self.normalise = Normalise(mean, std)
        self.crop_padding, self.flip = crop_padding, flip

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = self._n_train
        if batch_size > n:
            raise ValueError(
                f"a training step takes {batch_size} images and there are {n}: make batch or"
                " microbatches smaller"
            )
        generator = torch.Generator().manual_seed(hash((seed, epoch)))
        order = torch.randperm(n, generator=generator)
        return _MemoryBatches(self, self._train, order, batch_size, device, generator)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(self._n_test)[rank::n_ranks]
        return _MemoryBatches(self, self._test, order, batch_size, device, None)

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
class _MemoryBatches:
    images: InMemory
    source: Placed
    order: Tensor
    batch_size: int
    device: torch.device
    generator: torch.Generator | None
    rows: Rows = all_rows
    first: int = 0
    last: int | None = None  # before which it ends; None: with the images

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        n = full + bool(rest and self.generator is None)
        return (n if self.last is None else min(n, self.last)) - self.first

    def between(self, first: int, last: int) -> Batches:
        """See :class:`Batches`."""
        return replace(self, first=self.first + first, last=self.first + last)

    def __iter__(self) -> Iterator[Batch]:
        generator = None if self.generator is None else self.generator.clone_state()
        pixels, labels = self.source.on(self.device)
        batches = self.order.split(self.batch_size)[: self.first + len(self)]
        for k, chosen in enumerate(batches, start=-self.first):
            # Drawn for the whole batch, so that a part of it is augmented like the whole.
            drawn = self.images.draw(len(chosen), generator)
            if k < 0:
                continue
            rows = self.rows(k, len(chosen))
            if len(rows):
                there = send(torch.cat([chosen[None], drawn])[:, rows], self.device)
                yield self.images.cut(pixels, there[0], there[1:]), labels[there[0]]

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.interface.Divisible`."""
        return iter(replace(self, rows=rows_of(self.batch_size, n_parts, wanted)))

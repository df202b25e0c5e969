"""Small image sets: held in memory as one tensor, augmented a batch at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.training.data.images import Batch, Batches
from toolkit.training.data.parts import Rows, Wanted, all_rows, rows_of


@dataclass(frozen=True)
class Labelled:
    """Images ``[n, channels, size, size]`` of bytes, and their classes ``[n]``."""

    images: Tensor
    labels: Tensor


class InMemory:
    """An image set held as bytes in memory; normalised and augmented a batch at a time."""

    def __init__(
        self,
        train: Labelled,
        test: Labelled,
        n_classes: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop_padding: int = 0,
        flip: bool = False,
    ) -> None:
        self._train, self._test = train, test
        self.n_classes = n_classes
        self.in_channels, self.image_size = train.images.shape[1:3]
        self.mean = torch.tensor(mean).view(1, -1, 1, 1)
        self.std = torch.tensor(std).view(1, -1, 1, 1)
        self.crop_padding, self.flip = crop_padding, flip

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = len(self._train.labels)
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
        order = torch.arange(len(self._test.labels))[rank::n_ranks]
        return _MemoryBatches(self, self._test, order, batch_size, device, None)

    def prepare(
        self, images: Tensor, device: torch.device, generator: torch.Generator | None
    ) -> Tensor:
        """Normalised floats on ``device``; augmented if there is a generator."""
        images = images.to(device, non_blocking=True)
        x = (images.float() / 255 - self.mean.to(device)) / self.std.to(device)
        if generator is None:
            return x
        if self.crop_padding:
            x = _random_crop(x, self.crop_padding, generator)
        if self.flip:
            mirrored = torch.rand(len(x), 1, 1, 1, generator=generator) < 0.5
            x = torch.where(mirrored.to(device), x.flip(3), x)
        return x


@dataclass(frozen=True)
class _MemoryBatches:
    images: InMemory
    source: Labelled
    order: Tensor
    batch_size: int
    device: torch.device
    generator: torch.Generator | None
    rows: Rows = all_rows

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        return full + bool(rest and self.generator is None)

    def __iter__(self) -> Iterator[Batch]:
        generator = None if self.generator is None else self.generator.clone_state()
        for k, chosen in enumerate(self.order.split(self.batch_size)[: len(self)]):
            # Drawn for the whole batch, so that a part of it is augmented like the whole.
            x = self.images.prepare(self.source.images[chosen], self.device, generator)
            rows = self.rows(k, len(chosen))
            if len(rows):
                yield x[rows.to(self.device)], self.source.labels[chosen[rows]].to(self.device)

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.interface.Divisible`."""
        return iter(replace(self, rows=rows_of(self.batch_size, n_parts, wanted)))


def _random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Each image padded with zeros and cropped to its old size at a place of its own."""
    n, _, height, width = x.shape
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator).to(x.device)
    rows = top + torch.arange(height, device=x.device)
    columns = left + torch.arange(width, device=x.device)
    each = torch.arange(n, device=x.device)[:, None, None]
    cropped = padded[each, :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()

"""Larger image sets: torchvision's ImageFolder, read by a DataLoader's worker processes.

Images travel to the training device as bytes and are normalised there. The random crop of an image
depends on the seed, the epoch and its index only, whichever process reads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from toolkit.errors import UserError
from toolkit.model.input_spec import Images
from toolkit.training.data.batches import Wanted, rows_of, shuffled
from toolkit.training.data.corrupt_images import Skipped, first_readable, skips
from toolkit.training.data.image_files import DamagedImageError, open_split, read
from toolkit.training.data.normalize import Normalise
from toolkit.training.data.readers import Key, Readers, n_workers
from toolkit.training.data.sample_set import Batch, Batches

_NORMALISE = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's

Transform = Callable[[Any], Tensor]
"""A function from a PIL image to bytes `[3, size, size]`."""


def training_transform(size: int) -> Transform:
    """Return a random crop, resized to `size` pixels, and mirrored at random."""
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def evaluation_transform(size: int) -> Transform:
    """Return a resize to 8/7 of `size` pixels and a crop at the centre."""
    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), v2.PILToTensor()])


def apply_seeded(transform: Transform, image: Any, seed: int) -> Tensor:
    """Return `transform(image)` drawn by `seed`; torch's global generator stays as it was."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return transform(image)


class Folder:
    """An image set in class folders, read by worker processes.

    Args:
        train, test: the folders.
        image_size: height and width of the model's input, in pixels.
        num_workers: processes that read; None: one a core, shared by the ranks of this machine.
        prefetch_factor: batches that each of them reads ahead.
        damaged: `refuse` damaged images, or `skip` them: the next one of the same class replaces
            each of them.

    Raises:
        UserError: the folders do not hold images, or an option has no such value.
    """

    def __init__(
        self,
        train: Path,
        test: Path,
        image_size: int,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        damaged: str = "refuse",
    ) -> None:
        if image_size < 1:
            raise UserError(f"data.image_size is 1 or more: got {image_size}")
        skip = skips(damaged)
        self._skipped = Skipped()
        self.num_workers = n_workers(num_workers)
        images, test_images = open_split(train, test)
        self.form = Images(3, image_size, image_size, len(images.classes))
        options = (self._skipped, self.num_workers, prefetch_factor)
        self._train = _Split(_Source(images, training_transform(image_size), skip), *options)
        self._test = _Split(_Source(test_images, evaluation_transform(image_size), skip), *options)

    @property
    def damaged(self) -> tuple[str, ...]:
        """Paths of the images that this process has skipped so far."""
        return tuple(self._skipped.paths)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = len(self._train.images)
        order, _ = shuffled(n, batch_size, seed, epoch, self.form.samples)
        chosen = [*order.split(batch_size)][: n // batch_size]
        return _Loaded(self._train, hash((seed, epoch)), chosen, batch_size, device)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(len(self._test.images))[rank::n_ranks]
        chosen = [*order.split(batch_size)] if len(order) else []
        return _Loaded(self._test, 0, chosen, batch_size, device)


_Read = tuple[tuple[Tensor, int], list[str]]


@dataclass(frozen=True)
class _Source(Dataset[_Read]):
    """Transformed images with their classes, and the paths of damaged ones that were skipped."""

    images: ImageFolder
    transform: Transform
    skip: bool

    def __getitem__(self, key: Key) -> _Read:
        seed, index = key

        def transformed(index: int) -> tuple[Tensor, int]:
            image, label = read(self.images, index)
            return apply_seeded(self.transform, image, hash((seed, index))), label

        return first_readable(self.images, index, self.skip, transformed)


class _Split:
    """The training or the test images, and how they are read."""

    def __init__(
        self, source: _Source, skipped: Skipped, num_workers: int, prefetch_factor: int
    ) -> None:
        self.images, self.skipped = source.images, skipped
        self.readers = Readers(source, num_workers, prefetch_factor, _collate)

    def read(self, seed: int, chosen: list[Tensor], device: torch.device) -> Iterator[Batch]:
        """Yield bytes `[n, 3, size, size]` and classes `[n]`, on `device`."""
        for pixels, labels, paths in self.readers.read(seed, chosen, device.type == "cuda"):
            self.skipped.add(paths)
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def _collate(read: list[_Read]) -> tuple[Tensor, Tensor, list[str]]:
    """Return a batch, and the paths of the images that were skipped."""
    pixels, labels = default_collate([seen for seen, _ in read])
    return pixels, labels, [path for _, paths in read for path in paths]


@dataclass(frozen=True)
class _Loaded:
    """Batches of the images at `chosen`."""

    split: _Split
    seed: int
    chosen: list[Tensor]
    batch_size: int
    device: torch.device

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Batch]:
        try:
            for pixels, targets in self.split.read(self.seed, self.chosen, self.device):
                yield _NORMALISE(pixels), targets
        except DamagedImageError as error:  # a worker's has its traceback in its message
            message = str(error).rpartition("DamagedImageError: ")[2].strip()
            raise DamagedImageError(message) from None

    def between(self, first: int, last: int) -> Batches:
        """See `Batches`."""
        return replace(self, chosen=self.chosen[first:last])

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See `toolkit.runtime.microbatches.Divisible`."""
        rows = rows_of(self.batch_size, n_parts, wanted)
        parts = [indices[rows(k, len(indices))] for k, indices in enumerate(self.chosen)]
        return iter(replace(self, chosen=[part for part in parts if len(part)]))

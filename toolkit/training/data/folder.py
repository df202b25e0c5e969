"""Larger image sets: read from class folders by worker processes."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from toolkit.training.data.images import Batch, Batches
from toolkit.training.data.parts import Wanted, rows_of

_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_folder(folder: Path) -> ImageFolder:
    """The images in ``folder/<class>/``.

    Raises:
        ValueError: there are none.
    """
    try:
        return ImageFolder(str(folder))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} does not hold one folder of images a class: {error}") from error


def open_split(train: Path, test: Path) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images, of the same classes.

    Raises:
        ValueError: there are none, or their classes differ.
    """
    images, test_images = open_folder(train), open_folder(test)
    if differing := sorted(set(images.classes) ^ set(test_images.classes)):
        raise ValueError(
            f"{train} and {test} need a folder for each class, named alike: {differing[0]!r} is in"
            " one of them only"
        )
    return images, test_images


class Folder:
    """An image set in class folders, read by worker processes."""

    in_channels = 3

    def __init__(self, train: Path, test: Path, image_size: int, num_workers: int) -> None:
        self.image_size = image_size
        self.num_workers = min(num_workers, os.cpu_count() or num_workers)
        to_tensor = [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(_IMAGENET_MEAN, _IMAGENET_STD),
        ]
        self._augment = v2.Compose(
            [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip(), *to_tensor]
        )
        self._centre = v2.Compose(
            [v2.Resize(image_size * 8 // 7), v2.CenterCrop(image_size), *to_tensor]
        )
        self._train, self._test = open_split(train, test)
        self.n_classes = len(self._train.classes)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        if batch_size > len(self._train):
            raise ValueError(
                f"a training step takes {batch_size} images and there are {len(self._train)}: make"
                " batch or microbatches smaller"
            )
        generator = torch.Generator().manual_seed(hash((seed, epoch)))
        order = torch.randperm(len(self._train), generator=generator)
        images = _Seeded(self._train, self._augment, hash((seed, epoch)))
        chosen = [*order.split(batch_size)][: len(order) // batch_size]
        return _Loaded(images, chosen, batch_size, device, self.num_workers)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        images = _Seeded(self._test, self._centre, 0)
        order = torch.arange(len(self._test))[rank::n_ranks]
        chosen = [*order.split(batch_size)] if len(order) else []
        return _Loaded(images, chosen, batch_size, device, self.num_workers)


class DamagedImageError(ValueError):
    """An image file that cannot be decoded."""


def read(images: ImageFolder, index: int) -> tuple[Any, Any]:
    """The image at ``index``, and its class.

    Raises:
        DamagedImageError: it cannot be decoded; the message names its path.
    """
    try:
        image, label = images[index]
    except (OSError, SyntaxError) as error:
        path = images.samples[index][0]
        raise DamagedImageError(f"{path} cannot be decoded: mend it or take it out") from error
    return image, label


class _Seeded(Dataset[Batch]):
    """Draws each image's augmentation from a seed of its own, whichever worker reads it."""

    def __init__(self, images: ImageFolder, transform: v2.Transform, seed: int) -> None:
        self.images, self.transform, self.seed = images, transform, seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Batch:
        image, label = read(self.images, index)
        with torch.random.fork_rng([]):
            torch.manual_seed(hash((self.seed, index)))
            return self.transform(image), label


@dataclass(frozen=True)
class _Loaded:
    """Batches of the images at ``chosen``, read by worker processes."""

    images: _Seeded
    chosen: list[Tensor]
    batch_size: int
    device: torch.device
    num_workers: int

    def __len__(self) -> int:
        return len(self.chosen)

    def __iter__(self) -> Iterator[Batch]:
        loader: DataLoader[Batch] = DataLoader(
            self.images,
            batch_sampler=[indices.tolist() for indices in self.chosen],
            num_workers=self.num_workers,
            pin_memory=self.device.type == "cuda",
        )
        try:
            for inputs, targets in loader:
                yield (
                    inputs.to(self.device, non_blocking=True),
                    targets.to(self.device, non_blocking=True),
                )
        except DamagedImageError as error:  # a worker's comes with its traceback as its message
            last = str(error).strip().splitlines()[-1]
            raise DamagedImageError(last.partition("DamagedImageError: ")[2] or last) from None

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.interface.Divisible`."""
        rows = rows_of(self.batch_size, n_parts, wanted)
        parts = [indices[rows(k, len(indices))] for k, indices in enumerate(self.chosen)]
        return iter(replace(self, chosen=[part for part in parts if len(part)]))

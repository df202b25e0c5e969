"""Larger image sets: read from class folders by worker processes.

Images travel to the training device as bytes and are normalised there. What is drawn for each is a
function of the seed, the epoch and its number, whichever process reads it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder

from toolkit.training.data.decoding import Encoded, check_gpu, decode, read_encoded
from toolkit.training.data.files import DamagedImageError, open_split
from toolkit.training.data.images import Batch, Batches
from toolkit.training.data.parts import Wanted, rows_of
from toolkit.training.data.pixels import Normalise, send
from toolkit.training.data.readers import Key, Readers, n_workers
from toolkit.training.data.views import CentralView, RandomView, View

_NORMALISE = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
_DECODERS = ("cpu", "gpu")


class Folder:
    """An image set in class folders, read by worker processes.

    Args:
        train, test: the folders.
        image_size: height and width of what the model sees, in pixels.
        num_workers: processes that read; None: as many as cores, shared by the ranks here.
        prefetch_factor: batches that each of them reads ahead.
        decode: ``cpu``, in those processes, or ``gpu``.

    Raises:
        ValueError: the folders do not hold images, or an option has no such value.
    """

    in_channels = 3

    def __init__(
        self,
        train: Path,
        test: Path,
        image_size: int,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        decode: str = "cpu",
    ) -> None:
        if decode not in _DECODERS:
            raise ValueError(f"unknown data.decode {decode!r}: choose {' or '.join(_DECODERS)}")
        self.image_size = image_size
        self.num_workers = n_workers(num_workers)
        images, test_images = open_split(train, test)
        self.n_classes = len(images.classes)
        options = (decode == "gpu", self.num_workers, prefetch_factor)
        self._train = _Split(images, RandomView(image_size), *options)
        self._test = _Split(test_images, CentralView(image_size), *options)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = len(self._train.images)
        if batch_size > n:
            raise ValueError(
                f"a training step takes {batch_size} images and there are {n}: make batch or"
                " microbatches smaller"
            )
        generator = torch.Generator().manual_seed(hash((seed, epoch)))
        order = torch.randperm(n, generator=generator)
        chosen = [*order.split(batch_size)][: n // batch_size]
        return self._train.batches(hash((seed, epoch)), chosen, batch_size, device)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(len(self._test.images))[rank::n_ranks]
        chosen = [*order.split(batch_size)] if len(order) else []
        return self._test.batches(0, chosen, batch_size, device)


class _Split:
    """The training or the test images, and how they are read."""

    def __init__(
        self, images: ImageFolder, view: View, on_gpu: bool, num_workers: int, prefetch_factor: int
    ) -> None:
        self.images, self.view, self.on_gpu = images, view, on_gpu
        if on_gpu:
            self.readers = Readers(_Files(images, view), num_workers, prefetch_factor, list)
        else:
            self.readers = Readers(_Decoded(images, view), num_workers, prefetch_factor)

    def batches(
        self, seed: int, chosen: list[Tensor], batch_size: int, device: torch.device
    ) -> Batches:
        if self.on_gpu:
            check_gpu(device)
        return _Loaded(self, seed, chosen, batch_size, device)

    def read(self, seed: int, chosen: list[Tensor], device: torch.device) -> Iterator[Batch]:
        """Bytes ``[n, 3, size, size]`` and classes ``[n]``, on ``device``."""
        if self.on_gpu:
            for batch in self.readers.read(seed, chosen, pinned=False):
                seen = [
                    self.view.apply(pixels, image.cut)
                    for pixels, image in zip(decode(batch, device), batch, strict=True)
                ]
                yield torch.stack(seen), send(torch.tensor([x.label for x in batch]), device)
            return
        for pixels, labels in self.readers.read(seed, chosen, pinned=device.type == "cuda"):
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)


class _Files(Dataset[Encoded]):
    """Images to be decoded elsewhere."""

    def __init__(self, images: ImageFolder, view: View) -> None:
        self.images, self.view = images, view

    def __getitem__(self, key: Key) -> Encoded:
        return read_encoded(self.images, key, self.view)


class _Decoded(Dataset[tuple[Tensor, int]]):
    """What is seen of the images."""

    def __init__(self, images: ImageFolder, view: View) -> None:
        self.images, self.view = images, view

    def __getitem__(self, key: Key) -> tuple[Tensor, int]:
        image = read_encoded(self.images, key, self.view)
        (pixels,) = decode([image], torch.device("cpu"))
        return self.view.apply(pixels, image.cut), image.label


@dataclass(frozen=True)
class _Loaded:
    """Batches of the images at ``chosen``."""

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
        except DamagedImageError as error:  # a worker's comes with its traceback as its message
            last = str(error).strip().splitlines()[-1]
            raise DamagedImageError(last.partition("DamagedImageError: ")[2] or last) from None

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.interface.Divisible`."""
        rows = rows_of(self.batch_size, n_parts, wanted)
        parts = [indices[rows(k, len(indices))] for k, indices in enumerate(self.chosen)]
        return iter(replace(self, chosen=[part for part in parts if len(part)]))

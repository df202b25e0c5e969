"""Larger image sets: read from class folders by worker processes.

Images travel to the training device as bytes and are normalised there. What is drawn for each is a
function of the seed, the epoch and its number, whichever process reads it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from torchvision.datasets import ImageFolder

from toolkit.errors import UserError
from toolkit.model.input_spec import Images
from toolkit.training.data.batches import shuffled
from toolkit.training.data.corrupt_images import Read, Skipped, first_readable, skips
from toolkit.training.data.decoding import Encoded, check_gpu, decode, read_encoded
from toolkit.training.data.image_files import DamagedImageError, open_split
from toolkit.training.data.normalize import Normalise, send
from toolkit.training.data.readers import Key, Readers, n_workers
from toolkit.training.data.sample_set import Batch, Batches
from toolkit.training.data.slicing import Wanted, rows_of
from toolkit.training.data.transforms import CentralView, RandomView, View

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
        damaged: ``refuse`` damaged images, or ``skip`` them: the next one of its class stands in
            for each, whoever reads it.

    Raises:
        ValueError: the folders do not hold images, or an option has no such value.
    """

    def __init__(
        self,
        train: Path,
        test: Path,
        image_size: int,
        num_workers: int | None = None,
        prefetch_factor: int = 2,
        decode: str = "cpu",
        damaged: str = "refuse",
    ) -> None:
        if decode not in _DECODERS:
            raise UserError(f"unknown data.decode {decode!r}: choose {' or '.join(_DECODERS)}")
        if image_size < 1:
            raise UserError(f"data.image_size is 1 or more: got {image_size}")
        skip = skips(damaged)
        self._skipped = Skipped()
        self.num_workers = n_workers(num_workers)
        images, test_images = open_split(train, test)
        self.form = Images(3, image_size, image_size, len(images.classes))
        options = (self._skipped, decode == "gpu", self.num_workers, prefetch_factor)
        self._train = _Split(_Source(images, RandomView(image_size), skip), *options)
        self._test = _Split(_Source(test_images, CentralView(image_size), skip), *options)

    @property
    def damaged(self) -> tuple[str, ...]:
        """Paths of the images that this process has read and skipped so far."""
        return tuple(self._skipped.paths)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = len(self._train.images)
        order, _ = shuffled(n, batch_size, seed, epoch, self.form.samples)
        chosen = [*order.split(batch_size)][: n // batch_size]
        return self._train.batches(hash((seed, epoch)), chosen, batch_size, device)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(len(self._test.images))[rank::n_ranks]
        chosen = [*order.split(batch_size)] if len(order) else []
        return self._test.batches(0, chosen, batch_size, device)


@dataclass(frozen=True)
class _Source:
    """Images as a view shows them. Where damaged ones are skipped, their paths come, too."""

    images: ImageFolder
    view: View
    skip: bool

    def encoded(self, key: Key) -> tuple[Encoded, list[str]]:
        """The image of ``key``, whose head can be read."""
        return self._first(key, lambda key: read_encoded(self.images, key, self.view))

    def decoded(self, key: Key, device: torch.device) -> tuple[tuple[Tensor, int], list[str]]:
        """What is seen of the image of ``key``, and its class."""

        def seen(key: Key) -> tuple[Tensor, int]:
            image = read_encoded(self.images, key, self.view)
            (pixels,) = decode([image], device)
            return self.view.apply(pixels, image.cut), image.label

        return self._first(key, seen)

    def _first(self, key: Key, read: Callable[[Key], Read]) -> tuple[Read, list[str]]:
        return first_readable(self.images, key[1], self.skip, lambda k: read((key[0], k)))


class _Split:
    """The training or the test images, and how they are read."""

    def __init__(
        self,
        source: _Source,
        skipped: Skipped,
        on_gpu: bool,
        num_workers: int,
        prefetch_factor: int,
    ) -> None:
        self.source, self.skipped, self.on_gpu = source, skipped, on_gpu
        self.images = source.images
        if on_gpu:
            self.readers = Readers(_Files(source), num_workers, prefetch_factor, _packed)
        else:
            self.readers = Readers(_Decoded(source), num_workers, prefetch_factor, _together)

    def batches(
        self, seed: int, chosen: list[Tensor], batch_size: int, device: torch.device
    ) -> Batches:
        if self.on_gpu:
            check_gpu(device)
        return _Loaded(self, seed, chosen, batch_size, device)

    def read(self, seed: int, chosen: list[Tensor], device: torch.device) -> Iterator[Batch]:
        """Bytes ``[n, 3, size, size]`` and classes ``[n]``, on ``device``."""
        if self.on_gpu:
            for packed in self.readers.read(seed, chosen, pinned=False):
                batch = _unpacked(*packed)
                for _, paths in batch:
                    self.skipped.add(paths)
                seen, labels = zip(*self._seen([image for image, _ in batch], device), strict=True)
                yield torch.stack(seen), send(torch.tensor(labels), device)
            return
        pinned = device.type == "cuda"
        for pixels, labels, paths in self.readers.read(seed, chosen, pinned):
            self.skipped.add(paths)
            yield pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def _seen(self, images: list[Encoded], device: torch.device) -> list[tuple[Tensor, int]]:
        """What is seen of each image, decoded on ``device``, and its class."""
        try:
            decoded = zip(decode(images, device), images, strict=True)
            return [(self.source.view.apply(x, image.cut), image.label) for x, image in decoded]
        except DamagedImageError:
            if not self.source.skip:
                raise
        found = []
        for image in images:
            seen, paths = self.source.decoded(image.key, device)
            self.skipped.add(paths)
            found.append(seen)
        return found


@dataclass(frozen=True)
class _Files(Dataset[tuple[Encoded, list[str]]]):
    """Images to be decoded elsewhere."""

    source: _Source

    def __getitem__(self, key: Key) -> tuple[Encoded, list[str]]:
        return self.source.encoded(key)


@dataclass(frozen=True)
class _Decoded(Dataset[tuple[tuple[Tensor, int], list[str]]]):
    """What is seen of the images."""

    source: _Source

    def __getitem__(self, key: Key) -> tuple[tuple[Tensor, int], list[str]]:
        return self.source.decoded(key, torch.device("cpu"))


_Read = list[tuple[Encoded, list[str]]]


def _packed(batch: _Read) -> tuple[Tensor, list[torch.Size], _Read]:
    """The bytes of all images in one tensor: each that a process hands over is an open file."""
    data = [image.data for image, _ in batch]
    rest = [(image._replace(data=data[0][:0].clone()), paths) for image, paths in batch]
    return torch.cat([x.flatten() for x in data]), [x.shape for x in data], rest


def _unpacked(flat: Tensor, shapes: list[torch.Size], rest: _Read) -> _Read:
    parts = flat.split([shape.numel() for shape in shapes])
    return [
        (image._replace(data=part.view(shape)), paths)
        for part, shape, (image, paths) in zip(parts, shapes, rest, strict=True)
    ]


def _together(
    read: list[tuple[tuple[Tensor, int], list[str]]],
) -> tuple[Tensor, Tensor, list[str]]:
    """A batch, and the paths of the images that were skipped."""
    pixels, labels = default_collate([seen for seen, _ in read])
    return pixels, labels, [path for _, paths in read for path in paths]


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
            message = str(error).rpartition("DamagedImageError: ")[2].strip()
            raise DamagedImageError(message) from None

    def between(self, first: int, last: int) -> Batches:
        """See :class:`Batches`."""
        return replace(self, chosen=self.chosen[first:last])

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.microbatches.Divisible`."""
        rows = rows_of(self.batch_size, n_parts, wanted)
        parts = [indices[rows(k, len(indices))] for k, indices in enumerate(self.chosen)]
        return iter(replace(self, chosen=[part for part in parts if len(part)]))

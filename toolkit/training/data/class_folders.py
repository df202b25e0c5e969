"""Images in class folders, read by a DataLoader's worker processes.

Images travel to the training device as bytes and are normalised there. The random crop of an image
depends on the seed, the epoch and its number only, whichever process reads it.
"""

import multiprocessing
import os
import signal
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from tqdm import tqdm

from toolkit.errors import UserError, check_choice
from toolkit.model.input_spec import Images
from toolkit.training.data.batches import Source, SourceSet
from toolkit.training.data.datasets import seeded
from toolkit.training.data.in_memory import Normalise
from toolkit.training.data.sample_set import Batch

_NORMALISE = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # ImageNet's
_MOST_WORKERS = 16
_SIGNALS = {signal.SIGINT, signal.SIGTERM}

Transform = Callable[[Any], Tensor]
"""A function from a PIL image to bytes ``[3, size, size]``."""

Key = tuple[int, int]
"""The seed of an epoch, and the number of an image."""


def training_transform(size: int) -> Transform:
    """Return a random crop, resized to ``size`` pixels, and mirrored at random."""
    return v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])


def evaluation_transform(size: int) -> Transform:
    """Return a resize to 8/7 of ``size`` pixels and a crop at the centre."""
    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), v2.PILToTensor()])


class Folder(SourceSet):
    """An image set in class folders.

    See :func:`toolkit.training.data.image_folder` for the options.
    """

    def __init__(
        self,
        train: Path,
        test: Path,
        image_size: int,
        num_workers: int | None,
        prefetch_factor: int,
        damaged: str,
    ) -> None:
        for name, value, least in (
            ("image_size", image_size, 1),
            ("num_workers", num_workers or 0, 0),
            ("prefetch_factor", prefetch_factor, 1),
        ):
            if value < least:
                raise UserError(f"data.{name} is {least} or more: got {value}")
        check_choice("data.damaged", damaged, ("refuse", "skip"))
        images, test_images = open_split(train, test)
        self.num_workers = n_workers(num_workers)
        skip = damaged == "skip"
        self._damaged: dict[str, None] = {}
        options = (self._damaged, self.num_workers, prefetch_factor)
        super().__init__(
            _Loaded(_Images(images, training_transform(image_size), skip), *options),
            _Loaded(_Images(test_images, evaluation_transform(image_size), skip), *options),
            Images(3, image_size, image_size, len(images.classes)),
        )

    @property
    def damaged(self) -> tuple[str, ...]:
        """Paths of the images that this process has skipped so far."""
        return tuple(self._damaged)


def open_split(train: Path, test: Path) -> tuple[ImageFolder, ImageFolder]:
    """Return the training and the test images, of the same classes.

    Raises:
        UserError: a folder cannot be read, has a class without images, or their classes differ.
    """
    found = []
    for folder in (train, test):
        try:
            found.append(ImageFolder(str(folder)))
        except OSError as error:
            raise UserError(
                f"{folder} does not hold one folder of images for each class: {error}"
            ) from error
    images, test_images = found
    if differing := sorted({*images.classes} ^ {*test_images.classes}):
        raise UserError(
            f"{train} and {test} need the same class folders: only one of them has {differing[0]!r}"
        )
    return images, test_images


def read_image(images: ImageFolder, index: int, skip: bool) -> tuple[Any, int, list[str]]:
    """Read an image; if it is damaged, and ``skip``, the next readable image of its class.

    The choice depends on the files alone, not on the process or the rest of the batch.

    Returns:
        The PIL image, its number, and the paths of the damaged images before it.

    Raises:
        UserError: the image is damaged; or, if ``skip``, every image of its class is.
    """
    label = images.targets[index]
    first, end = bisect_left(images.targets, label), bisect_right(images.targets, label)
    damaged: list[str] = []
    for number in (*range(index, end), *range(first, index)):
        path = images.samples[number][0]
        try:
            if not os.path.isfile(path):  # to open a pipe would block
                raise FileNotFoundError(path)
            return images.loader(path), number, damaged
        except Exception as error:  # decoders raise anything on garbled bytes
            if not skip:
                raise UserError(
                    f"{path} cannot be decoded: repair it, remove it, or set data.damaged=skip"
                ) from error
            damaged.append(path)
    raise UserError(
        f"{os.path.join(images.root, images.classes[label])}: none of its {end - first} images can"
        " be decoded, and data.damaged=skip needs one: repair one, or remove the folder"
    )


def report_damaged(damaged: dict[str, None], paths: Iterable[str], *, warn: bool = True) -> None:
    """Add ``paths`` to the keys of ``damaged``, with a warning on stderr for each new one."""
    for path in paths:
        if path not in damaged:
            damaged[path] = None
            if warn:
                tqdm.write(
                    f"warning: {path} is damaged: another image of its class replaces it"
                    f" ({len(damaged)} so far)",
                    file=sys.stderr,
                )


def n_workers(asked: int | None) -> int:
    """Return the number asked for, at most one a core; None: this rank's share of the cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        cores = os.cpu_count() or 1
    if asked is None:
        return max(1, min(_MOST_WORKERS, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return min(asked, cores)


@dataclass(frozen=True)
class _Images(Dataset[Any]):
    """By key: the transformed image, its class, and the damaged images that it replaces."""

    images: ImageFolder
    transform: Transform
    skip: bool

    def __getitem__(self, key: Key) -> tuple[Tensor, int, list[str]] | UserError:
        seed, index = key
        try:
            image, number, damaged = read_image(self.images, index, self.skip)
        except UserError as error:
            return error  # a DataLoader would put a worker's traceback into its message
        pixels = seeded(hash((seed, number)), self.transform, image)
        return pixels, self.images.targets[number], damaged


def _collate(read: list[Any]) -> tuple[Tensor, Tensor, list[str]] | UserError:
    for each in read:
        if isinstance(each, UserError):
            return each
    pixels, labels, damaged = zip(*read, strict=True)
    return torch.stack(pixels), torch.tensor(labels), [path for paths in damaged for path in paths]


class _Loaded(Source):
    """The training or the test images, and the DataLoader that reads them."""

    def __init__(
        self, dataset: _Images, damaged: dict[str, None], num_workers: int, prefetch_factor: int
    ) -> None:
        self.dataset, self.damaged = dataset, damaged
        self._options: dict[str, Any] = {"num_workers": num_workers}
        if num_workers:
            self._options |= {"persistent_workers": True, "prefetch_factor": prefetch_factor}
        self._idle: dict[bool, DataLoader[Any]] = {}

    def __len__(self) -> int:
        return len(self.dataset.images)

    def read(
        self, batches: Iterable[tuple[Tensor, Tensor]], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        keys = [[(seed, k) for k in chosen.tolist()] for chosen, _ in batches]
        if not keys:
            return
        pinned = device.type == "cuda"
        # A loader that another epoch still reads is not idle: its workers serve one iterator.
        loader = self._idle.pop(pinned, None) or self._loader(pinned)
        loader.batch_sampler[:] = keys  # type: ignore[index]
        # Workers inherit the blocked signals, before they run any code.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            loaded = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for k, batch in enumerate(islice(loaded, len(keys)), start=1):
            if isinstance(batch, UserError):
                # The error's traceback would keep the workers alive, and what they have open.
                del loaded, loader
                raise batch
            if k == len(keys):  # callers that count batches never come back for more
                self._idle[pinned] = loader
            pixels, labels, damaged = batch
            report_damaged(self.damaged, damaged)
            # Bytes travel, a quarter of the floats.
            pixels = pixels.to(device, non_blocking=True)
            yield _NORMALISE(pixels), labels.to(device, non_blocking=True)

    def _loader(self, pinned: bool) -> "DataLoader[Any]":
        # joblib's processes have a start method of their own, which DataLoader cannot use.
        loky = multiprocessing.get_start_method() == "loky" and self._options["num_workers"]
        Finalize(None, _kill_workers, exitpriority=1)
        return DataLoader(
            self.dataset,
            batch_sampler=[],
            collate_fn=_collate,
            pin_memory=pinned,
            generator=torch.Generator(),
            multiprocessing_context="fork" if loky else None,
            worker_init_fn=_block_signals,
            **self._options,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_idle": {}}


# Slurm, torchrun and a terminal signal every process of a job. A run that saves a checkpoint first
# still reads batches then. So workers block the signals, and the run kills them when it exits.


def _block_signals(worker: int) -> None:
    # A spawned worker inherits nothing: multiprocessing unblocks the signals before it spawns.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _kill_workers() -> None:
    # multiprocessing would end daemons by the SIGTERM that they block, and wait for ever.
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()

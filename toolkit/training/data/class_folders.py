"""Images in class folders, read by a DataLoader's worker processes.

Images travel to the training device as bytes and are normalised there. The random crop of an image
depends on the seed, the epoch and its number only, whichever process reads it.
"""

import multiprocessing
import os
import signal
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from toolkit.errors import UserError, check_choice
from toolkit.model.input_spec import Images
from toolkit.training.data.batches import (
    Batch,
    Chosen,
    SampleSet,
    Source,
    normalise,
    seeded,
)
from toolkit.training.data.copy_ahead import copied_ahead

# torchvision, which is slow to load, is imported where it is used.

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_WORKERS = 16
_SIGNALS = {signal.SIGINT, signal.SIGTERM}

Transform = Callable[[Any], Tensor]
"""A function from a PIL image to bytes ``[3, size, size]``."""


def image_folder(
    root: str | None,
    image_size: int = 224,
    num_workers: int | None = None,
    validation: str = "val",
    prefetch_factor: int = 2,
    damaged: str = "refuse",
) -> SampleSet:
    """ImageNet, or any images in ``root/train/<class>/`` and ``root/val/<class>/``.

    Training images are cropped and resized at random and mirrored; test images are resized to
    8/7 of ``image_size`` and cropped at the centre (256 and 224 pixels, as in the paper).

    Args:
        root: the folder.
        image_size: height and width of the model's input, in pixels.
        num_workers: processes that read and decode; None: one a core, shared by the ranks of this
            machine, and 16 at most.
        validation: name of the folder of the test images.
        prefetch_factor: batches that each process reads ahead.
        damaged: ``refuse`` damaged images, or ``skip`` them: the next one of its class, in the
            order of their paths, replaces each.

    Raises:
        UserError: the folder is missing or holds something else, or an option is out of its range.
    """
    for name, value, minimum in (
        ("image_size", image_size, 1),
        ("num_workers", num_workers or 0, 0),
        ("prefetch_factor", prefetch_factor, 1),
    ):
        if value < minimum:
            raise UserError(f"data.{name} is {minimum} or more: got {value}")
    check_choice("data.damaged", damaged, ("refuse", "skip"))
    folder = check_root("image_folder", root, f"train/ and {validation}/")
    splits = open_split(folder / "train", folder / validation)
    replaced: list[str] = []
    transforms = (training_transform(image_size), evaluation_transform(image_size))
    sources = []
    for images, transform in zip(splits, transforms, strict=True):
        dataset = _Images(images, transform, skip=damaged == "skip")
        sources.append(_Loaded(dataset, replaced, num_workers, prefetch_factor))
    train, test = sources
    form = Images(3, image_size, image_size, len(splits[0].classes))
    return SampleSet(train, test, form, replaced)


def training_transform(size: int) -> Transform:
    """Return a random crop, resized to ``size`` pixels, and mirrored at random."""
    from torchvision.transforms import v2

    return v2.Compose(
        [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )


def evaluation_transform(size: int) -> Transform:
    """Return a resize to 8/7 of ``size`` pixels and a crop at the centre."""
    from torchvision.transforms import v2

    return v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), v2.PILToTensor()])


def check_root(name: str, root: str | None, expected: str) -> Path:
    """Return the folder ``data.root``; raise UserError if it is missing."""
    expected = (
        f"a folder that holds {expected} with one folder of images for each class"
    )
    if root is None:
        raise UserError(f"data={name} reads a folder: set data.root to {expected}")
    folder = Path(root).expanduser()
    if not os.path.isdir(folder):
        raise UserError(f"data.root={folder} is not a folder: expected {expected}")
    return folder


def open_split(train: Path, test: Path) -> list[Any]:
    """Return the training and the test images, as ImageFolders of the same classes."""
    from torchvision.datasets import ImageFolder

    splits = []
    for folder in (train, test):
        if not folder.is_dir():
            names = sorted(
                path.name for path in folder.parent.iterdir() if path.is_dir()
            )
            present = ", ".join(f"{name}/" for name in names[:10]) or "no folder"
            raise UserError(
                f"{folder} is missing: expected {train.name}/ for training and {test.name}/ for the"
                f" test, with one folder of images for each class; {folder.parent} has {present}"
            )
        try:
            splits.append(ImageFolder(str(folder)))
        except OSError as error:
            raise UserError(
                f"{folder} does not hold one folder of images for each class: {error}"
            ) from error
    differing = sorted({*splits[0].classes} ^ {*splits[1].classes})
    if differing:
        raise UserError(
            f"{train} and {test} need the same class folders: only one of them has {differing[0]!r}"
        )
    return splits


def read_image(
    images: Any, index: int, skip: bool = False
) -> tuple[Any, int, list[str]]:
    """Return a PIL image, its number, and the damaged images that it replaces.

    If the image of ``index`` is damaged, and ``skip``, the next readable one of its class is read.
    """
    label = images.targets[index]
    # An ImageFolder's images are in class order.
    class_start = bisect_left(images.targets, label)
    class_end = bisect_right(images.targets, label)
    damaged: list[str] = []
    for number in (*range(index, class_end), *range(class_start, index)):
        path = images.samples[number][0]
        try:
            if not os.path.isfile(path):  # to open a pipe would block
                raise FileNotFoundError(path)
            return images.loader(path), number, damaged
        except Exception as error:  # decoders raise anything on garbled bytes
            if not skip:
                raise UserError(
                    f"{path} cannot be decoded: repair it, remove it, or skip it by"
                    " data=image_folder data.damaged=skip"
                ) from error
            damaged.append(path)
    raise UserError(
        f"{os.path.join(images.root, images.classes[label])}: none of its {class_end - class_start}"
        " images can be decoded, and data.damaged=skip needs one: repair one, or remove the folder"
    )


def n_workers(requested: int | None) -> int:
    """Return the number requested, at most one a core; None: this rank's share of the cores."""
    # macOS lacks sched_getaffinity.
    affinity = getattr(
        os, "sched_getaffinity", lambda process: range(os.cpu_count() or 1)
    )
    cores = len(affinity(0))
    # Set by torchrun: the ranks of this machine.
    share = cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if requested is None:
        return max(1, min(_MAX_WORKERS, share))
    return min(requested, cores)


@dataclass(frozen=True)
class _Images(Dataset[Any]):
    """Images by (epoch's seed, number), each with its class and the damaged images it replaces."""

    images: Any
    transform: Transform
    skip: bool

    def __getitem__(
        self, key: tuple[int, int]
    ) -> tuple[Tensor, int, list[str]] | UserError:
        seed, index = key
        try:
            image, number, damaged = read_image(self.images, index, self.skip)
        except UserError as error:
            return error  # a DataLoader would put a worker's traceback into its message
        # By the image's number, so it does not matter which worker reads it, or for which image it
        # stands in.
        pixels = seeded(hash((seed, number)), self.transform, image)
        return pixels, self.images.targets[number], damaged


def _collate(items: list[Any]) -> tuple[Tensor, Tensor, list[str]] | UserError:
    for item in items:
        if isinstance(item, UserError):
            return item
    pixels, labels, damaged = zip(*items, strict=True)
    return torch.stack(pixels), torch.tensor(labels), [*chain.from_iterable(damaged)]


class _Loaded(Source):
    """The training or the test images, and the DataLoader that reads them."""

    def __init__(
        self,
        dataset: Any,
        damaged: list[str],
        num_workers: int | None,
        prefetch_factor: int,
    ) -> None:
        self.dataset = dataset
        self.damaged = damaged
        self._options: dict[str, Any] = {"num_workers": n_workers(num_workers)}
        if self._options["num_workers"]:
            self._options |= {
                "persistent_workers": True,
                "prefetch_factor": prefetch_factor,
            }
        # By whether batches are pinned. Workers stay alive between epochs, since to start them and
        # to import torch in each takes seconds.
        self._idle: dict[bool, DataLoader[Any]] = {}

    def __len__(self) -> int:
        return len(self.dataset.images)

    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        keys = []
        for sample_numbers, _ in batches:
            keys.append([(seed, number) for number in sample_numbers.tolist()])
        if not keys:
            return
        # Bytes travel, a quarter of the floats.
        host_batches = self._load(keys, pinned=device.type == "cuda")
        for pixels, labels in copied_ahead(host_batches, device):
            yield normalise(pixels, _IMAGENET_MEAN, _IMAGENET_STD), labels

    def _load(self, keys: list[list[tuple[int, int]]], pinned: bool) -> Iterator[Batch]:
        """Yield the bytes and the classes of batches, on the CPU."""
        # A loader that another epoch still reads is not idle: its workers serve one iterator.
        loader = self._idle.pop(pinned, None) or self._loader(pinned)
        # In place: a DataLoader takes no other batch_sampler once it is made, but reads this list
        # anew.
        loader.batch_sampler[:] = keys  # type: ignore[index]
        # Workers inherit the blocked signals, before they run any code.
        earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            loaded_batches = iter(loader)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)
        for n_read, batch in enumerate(islice(loaded_batches, len(keys)), start=1):
            if isinstance(batch, UserError):
                # The error's traceback would keep the workers alive, and what they have open.
                del loaded_batches, loader
                raise batch
            # Callers that count batches never come back for more.
            if n_read == len(keys):
                self._idle[pinned] = loader
            pixels, labels, damaged = batch
            for path in dict.fromkeys(damaged):
                if path not in self.damaged:
                    self.damaged.append(path)
                    tqdm.write(
                        f"warning: {path} is damaged: another image of its class replaces it"
                        f" ({len(self.damaged)} so far)",
                        file=sys.stderr,
                    )
            yield pixels, labels

    def _loader(self, pinned: bool) -> "DataLoader[Any]":
        # joblib's processes have a start method of their own, which DataLoader cannot use.
        uses_loky = (
            multiprocessing.get_start_method() == "loky"
            and self._options["num_workers"]
        )
        # Before multiprocessing's own exit handlers, which wait for daemons; see the note below.
        Finalize(None, _kill_workers, exitpriority=1)
        return DataLoader(
            self.dataset,
            batch_sampler=[],
            collate_fn=_collate,
            pin_memory=pinned,
            generator=torch.Generator(),
            multiprocessing_context="fork" if uses_loky else None,
            worker_init_fn=_block_signals,
            **self._options,
        )


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

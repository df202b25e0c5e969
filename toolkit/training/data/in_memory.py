"""Small image sets: bytes on the training device, augmented there a batch at a time."""

import gzip
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from toolkit.errors import UserError, first_line
from toolkit.model.input_spec import Images
from toolkit.training.data.batches import (
    Batch,
    Chosen,
    SampleSet,
    Source,
    normalise,
    send,
)
from toolkit.training.data.class_folders import check_root, open_split, read_image

# Of the training images, by channel.
_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR_STD = (0.2470, 0.2435, 0.2616)
_FASHION_ROOT = "/usr/share/datasets/fashion-mnist"  # of Debian's package


@dataclass(frozen=True)
class Labelled:
    """Images and their classes.

    Attributes:
        images: bytes ``[n, channels, height, width]``.
        labels: numbers of classes ``[n]``.
    """

    images: Tensor
    labels: Tensor


class InMemory(SampleSet):
    """An image set held as bytes on the training device; augmented and normalised there.

    Args:
        train, test: the images.
        n_classes: number of classes.
        mean, std: mean and standard deviation of each channel, black being 0 and white 1.
        crop_padding: pixels by which training images are padded before a random crop.
        flip: whether training images are mirrored at random.

    Attributes:
        device_bytes: size of the copy that a training device holds.

    Raises:
        UserError: ``crop_padding`` is negative.
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
    ) -> None:
        if crop_padding < 0:
            raise UserError(
                f"data.crop_padding is 0 or more pixels: got {crop_padding}"
            )
        for name, labelled in (("train", train), ("test", test)):
            # Checked now: on a GPU such a class would end the process in the loss, and name no
            # sample.
            is_wrong = (labelled.labels < 0) | (labelled.labels >= n_classes)
            if is_wrong.any():
                index = int(is_wrong.nonzero()[0])
                raise UserError(
                    f"{name}: sample {index} has class {labelled.labels[index]}; expected 0 to"
                    f" {n_classes - 1}"
                )
        channels, height, width = train.images.shape[1:]
        form = Images(channels, height, width, n_classes)
        training, testing = (
            _Images(
                labelled,
                mean=tuple(mean),
                std=tuple(std),
                crop_padding=crop_padding,
                flip=flip,
            )
            for labelled in (train, test)
        )
        super().__init__(training, testing, form)
        self.device_bytes = sum(
            tensor.nbytes
            for labelled in (train, test)
            for tensor in (labelled.images, labelled.labels)
        )


@dataclass(frozen=True)
class _Images(Source):
    """The training or the test images, copied to each device once."""

    labelled: Labelled
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_padding: int
    flip: bool
    copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labelled.labels)

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return ``[3, n]``: the crop's first row and column in the padded image, and the flip."""
        padding = self.crop_padding
        # The crop of a test image, and of a training image without padding, is the image itself.
        corners = torch.full((2, n), padding)
        mirrored = torch.zeros(1, n, dtype=torch.long)
        if generator is not None and padding:
            corners = torch.randint(2 * padding + 1, (2, n), generator=generator)
        if generator is not None and self.flip:
            mirrored = (torch.rand(1, n, generator=generator) < 0.5).long()
        return torch.cat([corners, mirrored])

    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        if device not in self.copies:
            self.copies[device] = (
                self.labelled.images.to(device),
                self.labelled.labels.to(device),
            )
        images, labels = self.copies[device]
        for sample_numbers, random_numbers in batches:
            # One transfer for the numbers and the augmentation of a whole batch.
            numbers, *augmentation = send(
                torch.cat([sample_numbers[None], random_numbers]), device
            )
            inputs = normalise(images[numbers], self.mean, self.std)
            if self.crop_padding or self.flip:
                inputs = self._augmented(inputs, *augmentation)
            yield inputs, labels[numbers]

    def _augmented(
        self, x: Tensor, row: Tensor, column: Tensor, mirrored: Tensor
    ) -> Tensor:
        """Return crops of padded images ``x`` from ``row`` and ``column`` on, some mirrored."""
        row_offsets = torch.arange(x.shape[2], device=x.device)
        column_offsets = torch.arange(x.shape[3], device=x.device)
        # A mirrored image reads its columns from right to left.
        column_offsets = torch.where(
            mirrored[:, None] > 0, column_offsets.flip(0), column_offsets
        )
        # Of each image's pixels: rows [n, height] and columns [n, width] in its padded copy.
        rows = row_offsets + row[:, None]
        columns = column_offsets + column[:, None]
        image = torch.arange(len(x), device=x.device)[:, None, None]
        padded = F.pad(x, (self.crop_padding,) * 4)
        # Dimensions of separated indices come first: [n, height, width, channels].
        cropped = padded[image, :, rows[:, :, None], columns[:, None, :]]
        return cropped.permute(0, 3, 1, 2).contiguous()


def digits() -> InMemory:
    """scikit-learn's handwritten digits: 8x8, grey; 1437 training and 360 test images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(
        images, labels, test_size=360, stratify=labels, random_state=0
    )
    train_images, test_images, train_labels, test_labels = split

    def labelled(images_of_split: Any, labels_of_split: Any) -> Labelled:
        grey = torch.as_tensor(images_of_split).reshape(-1, 1, 8, 8) / 16 * 255
        return Labelled(grey.to(torch.uint8), torch.as_tensor(labels_of_split).long())

    train = labelled(train_images, train_labels)
    test = labelled(test_images, test_labels)
    return InMemory(train, test, 10, (0.3,), (0.38,))


def synthetic(
    n_train: int = 512,
    n_test: int = 256,
    n_classes: int = 10,
    image_size: int = 32,
    in_channels: int = 3,
) -> InMemory:
    """Random images: one pattern per class, plus noise; they need no file.

    Args:
        n_train: number of training images.
        n_test: number of test images.
        n_classes: number of classes.
        image_size: height and width in pixels.
        in_channels: channels of an image.

    Raises:
        UserError: a number below 1.
    """
    for name, size in locals().items():
        if size < 1:
            raise UserError(f"data.{name} is 1 or more: got {size}")
    generator = torch.Generator().manual_seed(0)
    shape = (in_channels, image_size, image_size)
    patterns = torch.rand(n_classes, *shape, generator=generator)

    def draw(n: int) -> Labelled:
        labels = torch.randint(n_classes, (n,), generator=generator)
        noise = torch.rand(n, *shape, generator=generator)
        return Labelled(((patterns[labels] + noise) * 127.5).to(torch.uint8), labels)

    half = (0.5,) * in_channels
    return InMemory(draw(n_train), draw(n_test), n_classes, half, half)


def cifar10(
    root: str | None,
    crop_padding: int = 4,
    flip: bool = True,
    n_train: int | None = None,
    n_test: int | None = None,
) -> InMemory:
    """CIFAR-10: 32x32, colour; 50,000 training and 10,000 test images.

    Args:
        root: a folder that holds ``cifar-10-batches-py``, or ``train`` and ``test`` with one
            folder of images for each class.
        crop_padding: pixels by which training images are padded before a random crop.
        flip: whether training images are mirrored at random.
        n_train: number of training images, a fixed choice, equally many of each class; None: all.
        n_test: number of test images, likewise.

    Raises:
        UserError: the folder is missing or holds something else, or too few images; or an option
            is out of its range.
    """
    from torchvision.datasets import CIFAR10

    folder = check_root("cifar10", root, "cifar-10-batches-py/, or train/ and test/")
    has_published_files = os.path.lexists(folder / CIFAR10.base_folder)
    if has_published_files:
        # Its pickles are loaded only if their MD5 sums are the published ones.
        try:
            splits = [CIFAR10(str(folder), train=train) for train in (True, False)]
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"data.root={folder}: {folder / CIFAR10.base_folder} is incomplete or damaged:"
                " unpack cifar-10-python.tar.gz there again"
            ) from error
    else:
        splits = open_split(folder / "train", folder / "test")
        if len(splits[0].classes) != 10:
            raise UserError(
                f"{folder / 'train'} holds {len(splits[0].classes)} classes: CIFAR-10 has 10; use"
                " data=image_folder for other images"
            )
    labelled_splits = []
    for split, name, n_samples in zip(
        splits, ("n_train", "n_test"), (n_train, n_test), strict=True
    ):
        labels = torch.tensor(split.targets)
        sample_numbers = balanced_subset(n_samples, labels, name)
        if has_published_files:
            pixels = torch.from_numpy(split.data[sample_numbers.numpy()])
            images = pixels.permute(0, 3, 1, 2).contiguous()
        else:
            images = _decoded(split, sample_numbers)
        labelled_splits.append(Labelled(images, labels[sample_numbers]))
    train, test = labelled_splits
    return InMemory(train, test, 10, _CIFAR_MEAN, _CIFAR_STD, crop_padding, flip)


def fashion_mnist(
    root: str = _FASHION_ROOT,
    crop_padding: int = 2,
    flip: bool = True,
    n_train: int | None = None,
    n_test: int | None = None,
) -> InMemory:
    """Fashion-MNIST: 28x28, grey; 60,000 training and 10,000 test images of clothes.

    Args:
        root: a folder with the published files, ``train-images-idx3-ubyte.gz`` and three more.
        crop_padding: pixels by which training images are padded before a random crop.
        flip: whether training images are mirrored at random.
        n_train: number of training images, a fixed choice, equally many of each class; None: all.
        n_test: number of test images, likewise.

    Raises:
        UserError: a file is missing or damaged, or an option is out of its range.

    Source: Xiao et al., arXiv 1708.07747.
    """
    folder = Path(root).expanduser()
    labelled_splits = []
    for split, name, n_samples in (
        ("train", "n_train", n_train),
        ("t10k", "n_test", n_test),
    ):
        images = _read_idx(folder / f"{split}-images-idx3-ubyte.gz")
        labels = _read_idx(folder / f"{split}-labels-idx1-ubyte.gz").long()
        if images.shape != (len(labels), 28, 28) or labels.max() > 9:
            raise UserError(
                f"data.root={folder}: {split}-*.gz hold images {[*images.shape]} and labels"
                f" {[*labels.shape]} up to {labels.max()}; expected [n, 28, 28] and [n] up to 9"
            )
        sample_numbers = balanced_subset(n_samples, labels, name)
        labelled_splits.append(
            Labelled(images[sample_numbers, None], labels[sample_numbers])
        )
    train, test = labelled_splits
    return InMemory(train, test, 10, (0.2860,), (0.3530,), crop_padding, flip)


def _read_idx(file: Path) -> Tensor:
    """Return the bytes of a gzip IDX file, in the shape that its header gives."""
    try:
        # A bytearray, since torch warns of arrays that cannot be written.
        content = bytearray(gzip.decompress(file.read_bytes()))
        # Byte 3 is the number of dimensions. Their sizes, big-endian, and the values follow.
        n_dims = content[3]
        shape = np.frombuffer(content, ">u4", n_dims, offset=4)
        values = np.frombuffer(content, np.uint8, offset=4 + 4 * n_dims).reshape(shape)
    except (OSError, EOFError, zlib.error, IndexError, ValueError) as error:
        raise UserError(
            f"data.root={file.parent}: cannot read {file.name}: {first_line(error)}; Debian's"
            f" package dataset-fashion-mnist installs it in {_FASHION_ROOT}"
        ) from error
    return torch.from_numpy(values)


def _decoded(image_split: Any, sample_numbers: Tensor) -> Tensor:
    """Return the bytes ``[n, 3, 32, 32]`` of the images numbered ``sample_numbers``."""
    from torchvision.transforms.v2.functional import pil_to_tensor

    images = torch.empty(len(sample_numbers), 3, 32, 32, dtype=torch.uint8)
    reading = f"reading {Path(image_split.root).name}"
    bar = tqdm(sample_numbers.tolist(), desc=reading, leave=False, mininterval=1)
    for row, index in enumerate(bar):
        image, _, _ = read_image(image_split, index)
        if image.size != (32, 32):
            raise UserError(
                f"{image_split.samples[index][0]} is {image.width}x{image.height} pixels: expected"
                " 32x32; use data=image_folder for images of any size"
            )
        images[row] = pil_to_tensor(image)
    return images


def balanced_subset(n: int | None, labels: Tensor, option: str) -> Tensor:
    """Return numbers of ``n`` images, ascending: a fixed random choice, of all classes alike.

    The numbers of images of two classes differ by at most one, as long as each has images left.
    A larger subset holds the smaller ones. ``option`` names the option that sets ``n``.
    """
    if n is None:
        return torch.arange(len(labels))
    if not 1 <= n <= len(labels):
        raise UserError(
            f"data.{option} is 1 to {len(labels)}, the number of images, or null for all: got {n}"
        )
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    rank_in_class = torch.empty_like(shuffled)  # rank of each image within its class
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        rank_in_class[of_class] = torch.arange(len(of_class))
    # By rank: one image of each class, then a second one of each, and so on. The sort is stable, so
    # a larger n only adds images.
    return shuffled[rank_in_class[shuffled].argsort(stable=True)][:n].sort().values

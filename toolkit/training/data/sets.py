"""The image sets by name. Each gives the same batches for the same seed and epoch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.cli.process import is_rank_zero
from toolkit.errors import UserError
from toolkit.training.data.in_memory import InMemory, Labelled

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

    from toolkit.training.data.corrupt_images import Skipped
    from toolkit.training.data.image_loader import Folder

_PUBLISHED = "cifar-10-batches-py"
_CIFAR_MEAN, _CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def digits() -> InMemory:
    """scikit-learn's handwritten digits: 8x8, grey; 1437 training and 360 test images."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=360, stratify=labels, random_state=0)
    train_x, test_x, train_y, test_y = (torch.as_tensor(part) for part in split)
    grey = [(x.reshape(-1, 1, 8, 8) / 16 * 255).to(torch.uint8) for x in (train_x, test_x)]
    return InMemory(
        Labelled(grey[0], train_y.long()), Labelled(grey[1], test_y.long()), 10, (0.3,), (0.38,)
    )


def synthetic(
    n_train: int = 512,
    n_test: int = 256,
    n_classes: int = 10,
    image_size: int = 32,
    in_channels: int = 3,
) -> InMemory:
    """Random images, a pattern and noise a class: learnable, of any size, with no file.

    Raises:
        UserError: a number below 1.
    """
    sizes = {"n_train": n_train, "n_test": n_test, "n_classes": n_classes}
    for name, size in (sizes | {"image_size": image_size, "in_channels": in_channels}).items():
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
    damaged: str = "refuse",
) -> InMemory:
    """CIFAR-10: 32x32, colour; 50,000 training and 10,000 test images.

    Args:
        root: a folder that holds ``cifar-10-batches-py``, or ``train`` and ``test`` with one
            folder of images a class.
        crop_padding: training images are padded by as many pixels and cropped at random.
        flip: training images are mirrored at random.
        n_train, n_test: as many images only, of all classes alike and always the same ones; None
            is all.
        damaged: ``refuse`` damaged images in class folders, or ``skip`` them: the next one of its
            class stands in for each.

    Raises:
        UserError: the folder is missing or holds something else, or fewer images; or an option
            has no such value.
    """
    from toolkit.training.data.corrupt_images import Skipped, skips

    if crop_padding < 0:
        raise UserError(f"data.crop_padding is 0 or more pixels: got {crop_padding}")
    skip, skipped = skips(damaged), Skipped(tells=is_rank_zero())  # each rank reads them all
    expected = "cifar-10-batches-py/, or train/ and test/ with one folder of images a class"
    folder = _existing("cifar10", root, expected)
    wanted = {"n_train": n_train, "n_test": n_test}
    if os.path.lexists(folder / _PUBLISHED):
        found = [_published(folder, train) for train in (True, False)]
        train, test = (
            _part(images, balanced_subset(n, images.labels, name))
            for images, (name, n) in zip(found, wanted.items(), strict=True)
        )
    else:
        from toolkit.training.data.image_files import open_split

        _check_splits(folder, expected, "train", "test")
        split = open_split(folder / "train", folder / "test")
        if (n_classes := len(split[0].classes)) != 10:
            raise UserError(
                f"{folder / 'train'} holds folders of {n_classes} classes: CIFAR-10 has 10; take"
                " data=image_folder for other images"
            )
        chosen = [
            balanced_subset(n, torch.as_tensor(found.targets), name)
            for found, (name, n) in zip(split, wanted.items(), strict=True)
        ]
        train, test = (
            _decoded(*which, skip, skipped, size=32) for which in zip(split, chosen, strict=True)
        )
    return InMemory(
        train, test, 10, _CIFAR_MEAN, _CIFAR_STD, crop_padding, flip, damaged=skipped.paths
    )


def image_folder(
    root: str | None,
    image_size: int = 224,
    num_workers: int | None = None,
    validation: str = "val",
    prefetch_factor: int = 2,
    damaged: str = "refuse",
) -> "Folder":
    """ImageNet, or any images in ``root/train/<class>/`` and ``root/val/<class>/``.

    Training images are cropped and resized at random and mirrored; test images are resized to
    8/7 of ``image_size`` and cropped at the centre (256 and 224 pixels, as the paper has it).

    Args:
        root: the folder.
        image_size: height and width of what the model sees, in pixels.
        num_workers: processes that read and decode; None: as many as cores, shared by the ranks
            of this machine, and 16 at most.
        validation: the folder of the test images.
        prefetch_factor: batches that each process reads ahead.
        damaged: ``refuse`` damaged images, or ``skip`` them: the next one of its class, in the
            order of their paths, stands in for each.

    Raises:
        UserError: the folder is missing or holds something else, or an option has no such value.
    """
    expected = f"train/ and {validation}/ with one folder of images a class"
    if not validation:
        raise UserError("data.validation is the name of a folder, such as val: got nothing")
    folder = _existing("image_folder", root, expected)
    _check_splits(folder, expected, "train", validation)
    from toolkit.training.data.image_loader import Folder

    train, test = folder / "train", folder / validation
    return Folder(train, test, image_size, num_workers, prefetch_factor, damaged)


def _existing(name: str, root: str | None, expected: str) -> Path:
    if root is None:
        raise UserError(f"data={name} reads a folder: set data.root to one that holds {expected}")
    from toolkit.training.data.image_files import problem_of

    folder = Path(os.path.expanduser(root))
    if (problem := problem_of(folder)) is not None:
        raise UserError(f"data.root={folder} {problem}: expected a folder that holds {expected}")
    return folder


def _check_splits(root: Path, expected: str, *splits: str) -> None:
    from toolkit.training.data.image_files import contents, problem_of

    for name in splits:
        if (problem := problem_of(root / name)) is not None:
            raise UserError(
                f"data.root={root} does not hold {expected}: {name} {problem}; it"
                f" holds {contents(root)}"
            )


def _published(root: Path, train: bool) -> Labelled:
    """Read CIFAR-10's batch files by torchvision.

    They are pickles: torchvision loads them only if their MD5 sums are the published ones.
    """
    from torchvision.datasets import CIFAR10

    try:
        found = CIFAR10(str(root), train=train, download=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"data.root={root}: {root / _PUBLISHED} is incomplete or damaged: unpack"
            " cifar-10-python.tar.gz there again"
        ) from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return Labelled(images, torch.tensor(found.targets))


def _part(images: Labelled, chosen: Tensor) -> Labelled:
    return Labelled(images.images[chosen], images.labels[chosen])


def _decoded(
    found: "ImageFolder", chosen: Tensor, skip: bool, skipped: "Skipped", size: int
) -> Labelled:
    """The chosen images of class folders, in memory."""
    from torchvision.transforms import v2
    from tqdm import tqdm

    from toolkit.training.data import image_files as files
    from toolkit.training.data.corrupt_images import first_readable

    to_bytes = v2.PILToTensor()
    images = torch.empty(len(chosen), 3, size, size, dtype=torch.uint8)
    reading = f"reading {Path(found.root).name}"
    for k, index in enumerate(tqdm(chosen.tolist(), desc=reading, leave=False, mininterval=1)):
        (number, image), damaged = first_readable(
            found, index, skip, lambda number: (number, files.read(found, number)[0])
        )
        skipped.add(damaged)
        if image.size != (size, size):
            raise UserError(
                f"{found.samples[number][0]} is {image.width}x{image.height} pixels: expected"
                f" {size}x{size}; take data=image_folder for images of any size"
            )
        images[k] = to_bytes(image)
    return Labelled(images, torch.as_tensor(found.targets)[chosen])


def balanced_subset(n: int | None, labels: Tensor, option: str) -> Tensor:
    """The first ``n`` images of a fixed random order in which the classes take turns.

    Classes have equal numbers of them, or one more or less, as long as each has images left. A
    larger subset holds the smaller ones.

    Args:
        n: how many; None is all.
        labels: the classes of all images.
        option: what sets ``n``, as the error names it.

    Returns:
        their numbers, ascending.

    Raises:
        UserError: there are not so many.
    """
    everything = torch.arange(len(labels))
    if n is None:
        return everything
    if n < 1:
        raise UserError(f"data.{option} is 1 or more, or null for all: got {n}")
    if n > len(labels):
        raise UserError(
            f"data.{option}={n} and there are {len(labels)} images: give fewer, or null for all"
        )
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    turn = torch.empty_like(everything)
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        turn[of_class] = torch.arange(len(of_class))
    return shuffled[turn[shuffled].argsort(stable=True)][:n].sort().values

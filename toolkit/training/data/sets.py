"""The image sets by name. Each gives the same batches for the same seed and epoch."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit.errors import UserError, check_choice
from toolkit.training.data.in_memory import InMemory, Labelled

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

    from toolkit.training.data.class_folders import Folder

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
            folder of images for each class.
        crop_padding: pixels by which training images are padded before a random crop.
        flip: whether training images are mirrored at random.
        n_train: number of training images, a fixed choice, equally many of each class; None: all.
        n_test: number of test images, likewise.
        damaged: ``refuse`` damaged images in class folders, or ``skip`` them: the next one of its
            class replaces each.

    Raises:
        UserError: the folder is missing or holds something else, or too few images; or an option
            is out of its range.
    """
    from torchvision.datasets import CIFAR10

    if crop_padding < 0:
        raise UserError(f"data.crop_padding is 0 or more pixels: got {crop_padding}")
    check_choice("data.damaged", damaged, ("refuse", "skip"))
    folder = _folder("cifar10", root, "cifar-10-batches-py/, or train/ and test/")
    skipped: dict[str, None] = {}
    wanted = {"n_train": n_train, "n_test": n_test}
    if os.path.lexists(folder / CIFAR10.base_folder):
        found = [_published(folder, train) for train in (True, False)]
        train, test = (
            Labelled(images[chosen], labels[chosen])
            for (images, labels), (name, n) in zip(found, wanted.items(), strict=True)
            for chosen in [balanced_subset(n, labels, name)]
        )
    else:
        from toolkit.training.data.class_folders import open_split

        split = open_split(folder / "train", folder / "test")
        if (n_classes := len(split[0].classes)) != 10:
            raise UserError(
                f"{folder / 'train'} holds {n_classes} classes: CIFAR-10 has 10; use"
                " data=image_folder for other images"
            )
        train, test = (
            _decoded(
                images, balanced_subset(n, torch.tensor(images.targets), name), damaged, skipped
            )
            for images, (name, n) in zip(split, wanted.items(), strict=True)
        )
    return InMemory(
        train, test, 10, _CIFAR_MEAN, _CIFAR_STD, crop_padding, flip, damaged=tuple(skipped)
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
    if not validation:
        raise UserError("data.validation is the name of a folder, such as val: got nothing")
    folder = _folder("image_folder", root, f"train/ and {validation}/")
    from toolkit.training.data.class_folders import Folder

    train, test = folder / "train", folder / validation
    return Folder(train, test, image_size, num_workers, prefetch_factor, damaged)


def _folder(name: str, root: str | None, expected: str) -> Path:
    expected = f"a folder that holds {expected} with one folder of images for each class"
    if root is None:
        raise UserError(f"data={name} reads a folder: set data.root to {expected}")
    folder = Path(root).expanduser()
    if not os.path.isdir(folder):
        raise UserError(f"data.root={folder} is not a folder: expected {expected}")
    return folder


def _published(root: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Read CIFAR-10's batch files: images ``[n, 3, 32, 32]`` and classes ``[n]``.

    They are pickles: torchvision loads them only if their MD5 sums are the published ones.
    """
    from torchvision.datasets import CIFAR10

    try:
        found = CIFAR10(str(root), train=train, download=False)
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"data.root={root}: {root / CIFAR10.base_folder} is incomplete or damaged: unpack"
            " cifar-10-python.tar.gz there again"
        ) from error
    images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
    return images, torch.tensor(found.targets)


def _decoded(
    found: "ImageFolder", chosen: Tensor, damaged: str, skipped: dict[str, None]
) -> Labelled:
    """Return the chosen images of class folders; add damaged ones to ``skipped``."""
    from torchvision.transforms.v2.functional import pil_to_tensor
    from tqdm import tqdm

    from toolkit.training.data.class_folders import read_image, report_damaged

    images = torch.empty(len(chosen), 3, 32, 32, dtype=torch.uint8)
    reading = f"reading {Path(found.root).name}"
    for k, index in enumerate(tqdm(chosen.tolist(), desc=reading, leave=False, mininterval=1)):
        image, number, paths = read_image(found, index, damaged == "skip")
        # Every rank reads every image; one of them warns.
        report_damaged(skipped, paths, warn=os.environ.get("RANK", "0") == "0")
        if image.size != (32, 32):
            raise UserError(
                f"{found.samples[number][0]} is {image.width}x{image.height} pixels: expected"
                " 32x32; use data=image_folder for images of any size"
            )
        images[k] = pil_to_tensor(image)
    return Labelled(images, torch.tensor(found.targets)[chosen])


def balanced_subset(n: int | None, labels: Tensor, option: str) -> Tensor:
    """Return numbers of ``n`` images, ascending: a fixed random choice, of all classes alike.

    The numbers of images of two classes differ by at most one, as long as each has images left.
    A larger subset holds the smaller ones.

    Args:
        n: number of images; None: all.
        labels: the classes of all images.
        option: the option that sets ``n``, for the error.

    Raises:
        UserError: ``n`` is below 1, or above the number of images.
    """
    everything = torch.arange(len(labels))
    if n is None:
        return everything
    if not 1 <= n <= len(labels):
        raise UserError(
            f"data.{option} is 1 to {len(labels)}, the number of images, or null for all: got {n}"
        )
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    turn = torch.empty_like(everything)
    for label in labels.unique():
        of_class = shuffled[labels[shuffled] == label]
        turn[of_class] = torch.arange(len(of_class))
    return shuffled[turn[shuffled].argsort(stable=True)][:n].sort().values

"""Image files in class folders."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder


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


class DamagedImageError(ValueError):
    """An image file that cannot be decoded."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file that cannot be decoded.

    Raises:
        DamagedImageError: it cannot.
    """
    try:
        yield
    except (OSError, SyntaxError) as error:
        raise DamagedImageError(f"{path} cannot be decoded: mend it or take it out") from error


def read(images: ImageFolder, index: int) -> tuple[Any, int]:
    """The image at ``index``, as PIL has it, and its class.

    Raises:
        DamagedImageError: it cannot be decoded; the message names its path.
    """
    with naming(images.samples[index][0]):
        return images[index]

"""Image files in class folders."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS

from toolkit.errors import UserError

_SHOWN = 5  # names of what a folder holds, in a message


def problem_of(folder: Path) -> str | None:
    """Why ``folder`` is none that can be read; None if it is one."""
    try:
        os.stat(os.path.join(folder, "."))  # asks for the right to enter it, too
        with os.scandir(folder):
            return None
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is a file" if folder.exists() else "does not exist"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def contents(folder: str | Path) -> str:
    """What ``folder`` holds, as a message says it."""
    names = sorted(entry.name + "/" * _is_folder(entry) for entry in os.scandir(folder))
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


class ClassFolders(ImageFolder):
    """torchvision's, with the same images; but what it cannot read it does not leave out.

    Raises:
        UserError: a folder cannot be read, holds no folders of classes, or has a class without
            images.
    """

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        with _listing(directory), os.scandir(directory) as entries:
            classes = sorted(entry.name for entry in entries if _is_folder(entry))
        if not classes:
            raise UserError(
                f"{directory} does not hold one folder of images a class: it holds"
                f" {contents(directory)}; put the images of each class into a folder named after it"
            )
        return classes, {name: number for number, name in enumerate(classes)}

    @staticmethod
    def make_dataset(
        directory: str, class_to_idx: Mapping[str, int], *_: Any, **__: Any
    ) -> list[tuple[str, int]]:
        samples = []
        found = os.stat(directory)
        above = frozenset({(found.st_dev, found.st_ino)})
        for name, number in class_to_idx.items():
            folder = os.path.join(directory, name)
            paths = _images(folder, above)
            if not paths:
                raise UserError(
                    f"{folder} has no images: it holds {contents(folder)}; put files there that end"
                    f" with {', '.join(IMG_EXTENSIONS)}, or take the folder out"
                )
            samples += [(path, number) for path in paths]
        return samples


def _images(folder: str, above: frozenset[tuple[int, int]]) -> list[str]:
    """Paths of the images in ``folder`` and in the folders in it, in torchvision's order."""
    return [
        os.path.join(root, name)
        for root, names in sorted(_walk(folder, above))
        for name in sorted(names)
        if name.lower().endswith(IMG_EXTENSIONS)
    ]


def _walk(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Folders, through links as well, and the names of the files in each."""
    with _listing(folder):
        found = os.stat(os.path.join(folder, "."))
        with os.scandir(folder) as entries:
            folders = {entry.name: _is_folder(entry) for entry in entries}
    if (here := (found.st_dev, found.st_ino)) in above:
        raise UserError(f"{folder} is a link to a folder that holds it: take the link out")
    yield folder, [name for name, is_folder in folders.items() if not is_folder]
    for name, is_folder in folders.items():
        if is_folder:
            yield from _walk(os.path.join(folder, name), above | {here})


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


@contextmanager
def _listing(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read ({error.strerror}): expected a folder of images; make it"
            " readable, or take it out"
        ) from error


def open_split(train: Path, test: Path) -> tuple[ImageFolder, ImageFolder]:
    """The training and the test images, of the same classes.

    Raises:
        UserError: there are none, or their classes differ.
    """
    images, test_images = ClassFolders(str(train)), ClassFolders(str(test))
    if differing := sorted(set(images.classes) ^ set(test_images.classes)):
        where = train if differing[0] in images.classes else test
        raise UserError(
            f"{train} and {test} need a folder for each class, named alike: {differing[0]!r} is in"
            f" {where} only"
        )
    return images, test_images


class DamagedImageError(UserError):
    """An image file that cannot be decoded."""


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Name the file that cannot be decoded.

    Raises:
        DamagedImageError: it cannot.
    """
    try:
        yield
    except Exception as error:  # what a decoder raises on garbled bytes is of any kind
        reason = error.strerror if isinstance(error, OSError) else None
        problem = f"read ({reason})" if reason else "decoded"
        raise DamagedImageError(
            f"{path} cannot be {problem}: mend it or take it out, or set data.damaged=skip"
        ) from error


def check_file(path: str) -> None:
    """Refuse what is no file: a pipe would be waited for.

    Raises:
        OSError: it is none, or does not exist.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "it is no file")


def read(images: ImageFolder, index: int) -> tuple[Any, int]:
    """The image at ``index``, as PIL has it, and its class.

    Raises:
        DamagedImageError: it cannot be decoded; the message names its path.
    """
    path = images.samples[index][0]
    with naming(path):
        check_file(path)
        return images[index]

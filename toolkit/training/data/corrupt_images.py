"""Damaged images: refused; or skipped, and another image of its class stands in for each.

Which one does depends on the files alone: not on the process that reads, nor on the rest of a
batch, which stays as large as it is.
"""

import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from typing import TypeVar

from torchvision.datasets import ImageFolder
from tqdm import tqdm

from toolkit.errors import UserError
from toolkit.training.data.image_files import DamagedImageError

Read = TypeVar("Read")

_CHOICES = {"refuse": False, "skip": True}


def skips(damaged: str) -> bool:
    """Whether damaged images are skipped, by the option ``data.damaged``.

    Raises:
        UserError: it has no such value.
    """
    if damaged not in _CHOICES:
        raise UserError(f"unknown data.damaged {damaged!r}: choose {' or '.join(_CHOICES)}")
    return _CHOICES[damaged]


def first_readable(
    images: ImageFolder, index: int, skip: bool, read: Callable[[int], Read]
) -> tuple[Read, list[str]]:
    """The image at ``index``; or the next one of its class that can be read, round its class.

    Args:
        images: in the order of their classes.
        index: the number of an image.
        skip: whether others may stand in for it.
        read: gives the image of a number, or raises DamagedImageError.

    Returns:
        what ``read`` gives, and the paths of the damaged images that it was tried for before.

    Raises:
        DamagedImageError: none of them can be read; or, unless ``skip``, the one at ``index``.
    """
    label = images.targets[index]
    first, end = bisect_left(images.targets, label), bisect_right(images.targets, label)
    damaged: list[str] = []
    for number in (*range(index, end), *range(first, index)):
        try:
            return read(number), damaged
        except DamagedImageError:
            if not skip:
                raise
            damaged.append(images.samples[number][0])
    folder = os.path.join(images.root, images.classes[label])
    raise DamagedImageError(
        f"{folder}: none of its {end - first} images can be decoded, and data.damaged=skip needs"
        " one: mend them, or take the folder out"
    )


class Skipped:
    """Damaged images that were skipped; each is told once, by a line on stderr.

    Attributes:
        paths: theirs, as they were found.
    """

    def __init__(self, tells: bool = True) -> None:
        self.paths: list[str] = []
        self._known: set[str] = set()
        self._tells = tells

    def add(self, paths: Iterable[str]) -> None:
        for path in paths:
            if path in self._known:
                continue
            self._known.add(path)
            self.paths.append(path)
            if self._tells:
                tqdm.write(
                    f"warning: {path} is damaged: another image of its class stands in for it"
                    f" ({len(self.paths)} so far)",
                    file=sys.stderr,
                )

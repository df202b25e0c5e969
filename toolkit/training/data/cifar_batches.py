"""CIFAR-10's batch files, as published: pickles, which are checked and run no code.

What a pickle names is never imported: an array is the bytes that stand in the file, and any other
name ends the reading.
"""

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.training.data.image_files import check_file
from toolkit.training.data.in_memory import Labelled

FOLDER = "cifar-10-batches-py"
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_CLASSES = 10


def read_batches(root: Path, train: bool) -> Labelled:
    """The training or the test images of ``root/cifar-10-batches-py``.

    Raises:
        ValueError: a file is missing, cannot be read, or is not the published one.
    """
    from torchvision.datasets import CIFAR10

    parts = []
    for name, md5 in CIFAR10.train_list if train else CIFAR10.test_list:
        path = root / FOLDER / name
        try:
            parts.append(_labelled(_checked(path, md5)))
        except _DamagedFileError as error:
            raise UserError(
                f"data.root={root}: {path} {error}: {FOLDER}/ is incomplete or damaged; unpack"
                " cifar-10-python.tar.gz there again"
            ) from error
    images, labels = (torch.cat(found) for found in zip(*parts, strict=True))
    return Labelled(images, labels)


class _DamagedFileError(Exception):
    """What is wrong with a file."""


def _checked(path: Path, md5: str | None) -> bytes:
    """Its bytes, whose sum is ``md5``."""
    try:
        check_file(str(path))
        data = path.read_bytes()
    except FileNotFoundError:
        raise _DamagedFileError("is missing") from None
    except OSError as error:
        raise _DamagedFileError(f"cannot be read ({error.strerror})") from error
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if md5 is not None and found != md5:
        raise _DamagedFileError(
            f"({len(data)} bytes) has the MD5 sum {found} and the published file {md5}"
        )
    return data


def _labelled(data: bytes) -> tuple[Tensor, Tensor]:
    """Images ``[n, 3, 32, 32]`` and classes ``[n]`` of a batch file."""
    try:
        batch = Unpickler(data).load()
    except Exception as error:  # garbled bytes are any instructions
        problem = f"{error!r:.80}"
        raise _DamagedFileError(f"cannot be unpickled ({problem})") from error
    if not isinstance(batch, dict):
        raise _DamagedFileError(f"holds a {type(batch).__name__} and no batch of images")
    batch = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in batch.items()}
    pixels, labels = batch.get("data"), batch.get("labels")
    if not isinstance(pixels, Array) or not isinstance(labels, list):
        raise _DamagedFileError("holds no data and labels")
    if not pixels.are_images(len(labels)):
        raise _DamagedFileError(
            f"holds data of shape {pixels.shape} and {len(labels)} labels: expected as many rows of"
            f" {_PIXELS} bytes"
        )
    if wrong := [x for x in labels if type(x) is not int or not 0 <= x < _CLASSES]:
        raise _DamagedFileError(f"has the label {wrong[0]!r:.40}: expected 0 to {_CLASSES - 1}")
    images = torch.frombuffer(bytearray(pixels.data), dtype=torch.uint8)
    return images.view(-1, *_SHAPE), torch.tensor(labels)


class Array:
    """What stands in a pickle for a numpy array."""

    shape: Any = None
    data: Any = None
    of_bytes = in_rows = False

    def __setstate__(self, state: Any) -> None:
        _, self.shape, kind, in_columns, self.data = state
        self.of_bytes = isinstance(kind, _Kind) and kind.name in ("u1", b"u1")
        self.in_rows = not in_columns

    def are_images(self, n: int) -> bool:
        """Whether these are the bytes of ``n`` images, one or more."""
        whole = isinstance(self.data, bytes) and len(self.data) == n * _PIXELS
        bytes_in_rows = self.of_bytes and self.in_rows
        return n > 0 and whole and bytes_in_rows and self.shape == (n, _PIXELS)


class _Kind:
    """What stands in a pickle for a numpy type."""

    def __init__(self, name: Any, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None:
        """The order of its bytes, which one byte has not."""


def _array(*_: Any) -> Array:
    return Array()


_NAMES = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Kind,
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
}


class Unpickler(pickle._Unpickler):  # the one in C asks for memory by what a garbled byte says
    """Reads plain values and arrays; strings of Python 2 as bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        if (found := _NAMES.get((module, name))) is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch does")
        return found

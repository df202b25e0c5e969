"""A checkpoint in one file, which is there whole or not at all.

The file is a line that names the format, the SHA-256 of the rest, and what torch.save made. It is
written beside its place, flushed to the disk and renamed; so a reader never finds half of one.
"""

import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from toolkit.errors import UserError
from toolkit.files import replacing

_MAGIC = b"cdp-toolkit checkpoint 1\n"


class DamagedCheckpointError(UserError):
    """A file that is not, or is no longer, a whole checkpoint."""


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state``, of tensors and plain values, in one piece.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    payload = serialised(state)
    digest = hashlib.sha256(payload).hexdigest().encode() + b"\n"
    write_bytes(path, _MAGIC, digest, payload)


def serialised(state: Mapping[str, Any]) -> bytes:
    """What torch.save makes of ``state``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def write_bytes(path: Path, *parts: bytes) -> None:
    """Write a file that is never seen half written.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    with replacing(path) as beside, beside.open("wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def read(path: Path) -> dict[str, Any]:
    """The state that was written to ``path``, its tensors on the CPU.

    Raises:
        DamagedCheckpointError: the file is not as it was written.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    head = len(_MAGIC) + 65
    if len(content) < head:
        raise DamagedCheckpointError(f"{path} is damaged: it is cut off")
    if not content.startswith(_MAGIC):
        raise DamagedCheckpointError(f"{path} is not a checkpoint of this version")
    payload = memoryview(content)[head:]
    if content[len(_MAGIC) : head] != hashlib.sha256(payload).hexdigest().encode() + b"\n":
        raise DamagedCheckpointError(f"{path} is damaged: its bytes are not those written")
    try:
        state = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise DamagedCheckpointError(
            f"{path} holds what is not tensors and plain values: it was not written by this toolkit"
        ) from error
    assert isinstance(state, dict)
    return state


def sync_folder(folder: Path) -> None:
    """Have the disk know the folder's new names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(new: Path, old: Path) -> None:
    """Give ``new`` the name of ``old``, whether or not there is one."""
    before = old.with_name(f".{old.name}.before")
    shutil.rmtree(before, ignore_errors=True)
    with suppress(FileNotFoundError):
        old.rename(before)
    new.rename(old)
    sync_folder(old.parent)
    shutil.rmtree(before, ignore_errors=True)

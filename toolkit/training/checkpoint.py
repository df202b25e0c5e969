"""Checkpoints: whole or not at all, and of those that are damaged the one before.

A file is a line that names the format, the SHA-256 of the rest, and what torch.save made. It is
written beside its place, flushed to the disk and renamed; so a reader never finds half of one.
"""

import hashlib
import io
import os
import pickle
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_MAGIC = b"cdp-toolkit checkpoint 1\n"
_NAME = re.compile(r"step_(\d{9})\.ckpt")


class DamagedCheckpointError(ValueError):
    """A file that is not, or is no longer, a whole checkpoint."""


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write ``state``, of tensors and plain values, in one piece.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    payload = serialised(state)
    digest = hashlib.sha256(payload).hexdigest().encode() + b"\n"
    write_bytes(path, _MAGIC, digest, payload)


def serialised(state: Mapping[str, Any]) -> memoryview:
    """What torch.save makes of ``state``."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getbuffer()


def write_bytes(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file that is never seen half written.

    Raises:
        OSError: it cannot be written; what was at ``path`` is still there.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def read(path: Path) -> dict[str, Any]:
    """The state that was written to ``path``, its tensors on the CPU.

    Raises:
        DamagedCheckpointError: the file is not as it was written.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    head = len(_MAGIC) + 65
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


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they are.
        keep: how many of the latest stay; the best stays beside them.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(f"save.keep is 1 or more: got {keep}")
        self.folder, self.keep = folder, keep

    def save(self, state: Mapping[str, Any], step: int, *, best: bool = False) -> None:
        """Keep ``state``, taken after ``step`` training steps, and let go of the oldest.

        Args:
            state: of tensors and plain values.
            step: training steps of the run until then.
            best: whether the run was never better.

        Raises:
            OSError: it cannot be written; the earlier ones are still there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step_{step:09d}.ckpt"
        write(path, state)
        if best:
            write(self.folder / "best.ckpt", state)
        for old in self.paths()[: -self.keep]:
            old.unlink(missing_ok=True)

    def paths(self) -> list[Path]:
        """Those that there are, the oldest first; without the best."""
        found = self.folder.glob("step_*.ckpt")
        return sorted(path for path in found if _NAME.fullmatch(path.name))

    def load(self, skip: int = 0) -> tuple[dict[str, Any], list[str]]:
        """The latest state that is whole, and a sentence on each later one that is not.

        Args:
            skip: how many of the latest to pass over; the oldest is never passed over.

        Raises:
            ValueError: there is none.
        """
        damaged: list[str] = []
        paths = self.paths()
        for path in reversed(paths[: max(1, len(paths) - skip)]):
            try:
                return read(path), damaged
            except (DamagedCheckpointError, OSError) as error:
                damaged.append(str(error))
        if damaged:
            raise ValueError(f"no checkpoint in {self.folder} is whole: {'; '.join(damaged)}")
        raise ValueError(
            f"there is no checkpoint in {self.folder}: give resume= the output directory of a run"
            " that has saved one"
        )


def _sync_folder(folder: Path) -> None:
    """Have the disk know the folder's new names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""W&B's offline files, read back: records in the framing of LevelDB's log."""

import struct
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError

_MAGIC = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_HEAD = struct.Struct("<IHB")  # checksum, length, type: whole, first, middle or last part
_FIRST_OF, _LAST_OF = (1, 2), (1, 4)
_LAST = 64  # records among which the end is
_PAUSE = 0.02  # seconds between two looks


def records(path: Path) -> Iterator[Any]:
    """The records that were written to a ``.wandb`` file, as W&B's own messages.

    Raises:
        ValueError: the file is none.
    """
    return map(_parsed, payloads(path))


def _parsed(payload: bytes) -> Any:
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
    record.ParseFromString(payload)
    return record


def payloads(path: Path) -> Iterator[bytes]:
    """The records as bytes; of a file that is cut off, those that are whole.

    Raises:
        ValueError: the file is none of W&B's.
    """
    content = path.read_bytes()
    if not content.startswith(_MAGIC):
        raise UserError(f"{path} is not a file of W&B")
    at, parts = len(_MAGIC), b""
    while at + _HEAD.size <= len(content):
        if (left := _BLOCK - at % _BLOCK) < _HEAD.size:
            at += left
            continue
        _, length, part = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        if part == 0 or at + length > len(content):
            return
        parts = (b"" if part in _FIRST_OF else parts) + content[at : at + length]
        at += length
        if part in _LAST_OF:
            yield parts


def complete(folder: Path, within: float = 5.0) -> bool:
    """Whether the offline run in ``folder`` is written to its end.

    Args:
        folder: ``offline-run-...``.
        within: seconds that W&B's own process may still need for it.
    """
    end = time.monotonic() + within
    while not _has_end(folder):
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def _has_end(folder: Path) -> bool:
    try:
        (path,) = folder.glob("*.wandb")
        return any(_parsed(payload).HasField("exit") for payload in deque(payloads(path), _LAST))
    except (OSError, ValueError):
        return False

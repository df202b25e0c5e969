"""The digests of a folder's files, in the form of ``sha256sum``."""

import hashlib
from pathlib import Path

from toolkit.training.checkpoint import DamagedCheckpointError, write_bytes

_SUMS = "SHA256SUMS"


def sums(folder: Path, rank: int, size: int) -> list[str]:
    """A line a file, of the share of one of ``size`` ranks."""
    return [_line(_sum(file), file.name) for file in _files(folder)[rank::size]]


def write_sums(folder: Path, lines: list[str]) -> None:
    """Put down the lines of all ranks.

    Raises:
        OSError: they cannot be written.
    """
    write_bytes(folder / _SUMS, "".join(lines).encode())


def check_sums(folder: Path, rank: int, size: int) -> None:
    """Look at the share of one of ``size`` ranks, and whether all files are there.

    Raises:
        DamagedCheckpointError: they are not as they were written.
        OSError: one cannot be read.
    """
    try:
        text = (folder / _SUMS).read_text()
        pairs = [line.split("  ", 1) for line in text.splitlines()]
        known = {name: digest for digest, name in pairs}
        whole = text == "".join(map(_line, known.values(), known))
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise DamagedCheckpointError(f"{folder} is damaged: it has no {_SUMS} that can be read")
    there = {file.name for file in _files(folder)}
    for name in sorted(known.keys() ^ there):
        fault = f"{_SUMS} does not name {name}" if name in there else f"it lacks {name}"
        raise DamagedCheckpointError(f"{folder} is damaged: {fault}")
    for name in sorted(known)[rank::size]:
        if _sum(folder / name) != known[name]:
            raise DamagedCheckpointError(
                f"{folder} is damaged: the bytes of {name} are not those written"
            )


def _line(digest: str, name: str) -> str:
    return f"{digest}  {name}\n"


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name != _SUMS)


def _sum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()

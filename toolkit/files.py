"""Paths of the project, and files that are written atomically."""

import csv
import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError

_PACKAGE = Path(__file__).resolve().parent
ROOT = _PACKAGE.parent
# A wheel has them within.
_HOME = _PACKAGE if (_PACKAGE / "experiments").is_dir() else ROOT
EXPERIMENTS = _HOME / "experiments"
CONSOLE = "cyclic-dp"
"""The console command, and the distribution's name."""

Rows = Sequence[Mapping[str, Any]]
_MOST_BYTES = 2**26  # of a file that is read into memory
_MOST_VALUES = 1_000_000  # of a JSON or YAML file, with its aliases written out


def check_regular(path: Path, max_bytes: int | None = _MOST_BYTES) -> None:
    """Raise OSError unless ``path`` is a regular file of at most ``max_bytes``.

    A pipe would block its reader, and a device or a sparse file would fill the memory.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if max_bytes is not None and status.st_size > max_bytes:
        reason = f"it has {status.st_size} bytes; expected at most {max_bytes}"
        raise OSError(errno.EFBIG, reason, str(path))


def read_plain(path: Path) -> Any:
    """Read the plain values of a JSON or YAML file, which anybody may have written.

    Raises:
        OSError: the file cannot be read, is not a regular one, or is too large.
        ValueError: its content is neither, has lone surrogates, or more values than a result has.
    """
    check_regular(path)
    text = path.read_text(encoding="utf-8")
    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # C is ten times as fast
        content = (
            json.loads(text) if path.suffix == ".json" else yaml.load(text, loader)
        )
    except (RecursionError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    encoder = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=str)
    # Encode part by part and stop early: a YAML file's aliases may expand to 10**9 values.
    for index, text_part in enumerate(encoder.iterencode(content)):
        text_part.encode()
        if index > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES} values")
    return content


def digest_of(path: Path) -> str:
    """Return the SHA-256 digest of a file's bytes, in hexadecimal digits.

    Raises:
        OSError: the file cannot be read, is not a regular one, or is too large.
    """
    check_regular(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write indented JSON; numbers that are not finite become null."""
    write_text(
        path,
        json.dumps(_finite(content), indent=2, default=str, allow_nan=False) + "\n",
    )


def write_csv(path: Path, rows: Rows) -> None:
    """Write one line per row, with the columns of the first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


@contextmanager
def note_write_errors(notes: list[str], folder: Path) -> Iterator[None]:
    """Append a note instead of raising OSError when ``folder`` cannot be written."""
    try:
        yield
    except OSError as error:
        notes.append(f"not written: {error.filename or folder}: {error.strerror}")


def _finite(content: Any) -> Any:
    """Return plain values with None in place of numbers that are not finite."""
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; raise OSError if it cannot be written."""
    with replacing(path) as temporary:
        temporary.write_text(
            text, encoding="utf-8", errors="backslashreplace", newline=""
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` at the end, atomically.

    After an OSError, which names ``path``, the temporary file is removed and ``path`` unchanged.
    """
    # In the same folder, since a rename is atomic only within a file system; with the process,
    # since two may write.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno is not None:
            error.filename = str(path)
        raise


def conf() -> Path:
    """Return the folder of the configuration; raise UserError if there is none."""
    folder = _HOME / "conf"
    if not (folder / "hardware").is_dir():
        raise UserError(
            f"no configuration in {folder}: install the project by pip install -e ."
        )
    return folder


def started_by(experiment: str, n_ranks: int = 1, nodes: int = 1) -> str:
    """Return the words that start an experiment in a shell.

    Args:
        experiment: train, compare, ...
        n_ranks: processes of each node; torchrun starts more than one.
        nodes: machines.
    """
    if n_ranks * nodes == 1:
        return f"{CONSOLE} {experiment}"
    words = ["torchrun"]
    if nodes > 1:
        words.append(f"--nnodes {nodes}")
    words.append(f"--nproc-per-node {n_ranks} -m toolkit {experiment}")
    return " ".join(words)

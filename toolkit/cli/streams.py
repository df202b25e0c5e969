"""Standard output and error that may fail: nobody may read them, or their disk be full.

What a run prints is the least of it, so what cannot be printed is lost and the run goes on.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Lossy:
    """A text stream that loses what it cannot write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):  # for good; what C and other processes write, too
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy() -> Iterator[None]:
    """Have ``sys.stdout`` and ``sys.stderr`` lose what they cannot write; closed ones, all."""
    before = sys.stdout, sys.stderr
    if None in before:
        _open_closed()
    sys.stdout, sys.stderr = (
        Lossy(os.fdopen(fd, "w", closefd=False) if stream is None else stream)
        for fd, stream in zip((1, 2), before, strict=True)
    )
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _open_closed() -> None:
    """Have all three file descriptors be those of a stream, and not of the next file."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)

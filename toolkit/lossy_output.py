"""Output streams that discard what cannot be written: a closed pipe or a full disk ends no run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class LossyStream:
    """A text stream that discards what cannot be written, so that the run continues."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text`` if possible; return the characters written or discarded."""
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; discard what cannot be written."""
        with self._discarding():
            self._stream.flush()

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # It stays broken: also silence C code and child processes that write to it.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except OSError:
            pass  # a full disk may have room again

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Make standard output and error lossy; closed ones discard everything."""
    earlier_streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    # Descriptors 0 to 2 must be taken, or the next file that is opened gets printed text.
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name, stream in earlier_streams.items():
        setattr(sys, name, LossyStream(stream or open(os.devnull, "w")))  # noqa: SIM115
    try:
        yield
    finally:
        for name, stream in earlier_streams.items():
            getattr(sys, name).flush()
            setattr(sys, name, stream)

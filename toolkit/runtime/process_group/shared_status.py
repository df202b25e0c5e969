"""A rank's record, in memory that outlives it and that the other ranks of its machine read."""

import contextlib
import fcntl
import mmap
import os
import signal
import weakref
from pathlib import Path

from toolkit.runtime.process_group.diagnosis import Position, Record

_SLOT = 1 << 16  # bytes; only the pages that are written take memory


class Process:
    """A process of this machine. Its start time distinguishes it from a later one of its number.

    Args:
        pid: its number.
        started: its start time; read from the running process unless given.
    """

    def __init__(self, pid: int, started: str | None = None) -> None:
        self.pid = pid
        self.started = _stat(pid)[1] if started is None else started

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP."""
        return _stat(self.pid)[0] in ("T", "t")

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if not self.gone:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class SharedStatus:
    """A rank's record in shared memory. Each instruction writes it, so that must be quick."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, 1 + 2 * _SLOT)
        if fd >= 0:
            weakref.finalize(self, os.close, fd)

    @classmethod
    def make(cls) -> "SharedStatus":
        """Make that of this process. Only Linux shares it."""
        fd = os.memfd_create("watch") if hasattr(os, "memfd_create") else -1
        if fd >= 0:
            os.ftruncate(fd, 1 + 2 * _SLOT)
        made = cls(fd)
        made.write(Record(Position("start")))
        return made

    @classmethod
    def of(cls, pid: int, fd: int) -> "SharedStatus | None":
        """Open that of another process; None if it is not readable."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        except (OSError, ValueError):
            return None

    def write(self, record: Record) -> None:
        """Write the record. Two threads must not do so at the same time."""
        # Into the unused slot, so that a rank that is killed here leaves its last record.
        slot, text = 1 - self._memory[0], record.encode().encode() + b"\0"
        self._memory[1 + slot * _SLOT : 1 + slot * _SLOT + len(text)] = text
        self._memory[0] = slot

    def read(self) -> Record:
        """Return the latest record."""
        while True:  # a running rank may write while this one reads
            start = 1 + self._memory[0] * _SLOT
            with contextlib.suppress(ValueError, TypeError):
                return Record.decode(self._memory[start : self._memory.find(b"\0", start)])

    def lock(self) -> bool:
        """Return whether this process is the first to lock the memory, for good."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def machine() -> str:
    """Return a name that only processes share that have the same clock and process numbers."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and start time of a process; empty if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]

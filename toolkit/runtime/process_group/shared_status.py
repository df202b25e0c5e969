"""A rank's position, in memory that outlives it and that other ranks of the machine read."""

import contextlib
import fcntl
import mmap
import os
import signal
import struct
import tempfile
import weakref
from pathlib import Path

from toolkit.runtime.process_group.diagnosis import RankStatus

_STATUS = struct.Struct("<q")
_POSITION = struct.Struct("<q2000s")  # step or -1, and a text padded with zeros
_SIZE = _STATUS.size + _POSITION.size


class Process:
    """A process of this machine. Its start time tells it from a later one with its number."""

    def __init__(self, pid: int, started: str | None = None) -> None:
        self.pid = pid
        self.started = _stat(pid)[1] if started is None else started

    @property
    def gone(self) -> bool:
        if not Path("/proc/self/stat").exists():  # as on macOS
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 0)
                return False
            return True
        state, started = _stat(self.pid)
        return state in ("", "Z", "X") or started != self.started

    @property
    def stopped(self) -> bool:
        return _stat(self.pid)[0] in ("T", "t")

    def kill(self) -> None:
        if not self.gone:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class SharedStatus:
    """A rank's status and position. Each instruction writes it, so that must be quick."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, _SIZE)
        weakref.finalize(self, os.close, fd)

    @classmethod
    def make(cls) -> "SharedStatus":
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("watch")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, _SIZE)
        return cls(fd)

    @classmethod
    def of(cls, pid: int, fd: int) -> "SharedStatus | None":
        """Open that of another process; None if it is not readable."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        except (OSError, ValueError):
            return None

    @property
    def status(self) -> RankStatus:
        return RankStatus(*_STATUS.unpack_from(self._memory))

    @status.setter
    def status(self, status: RankStatus) -> None:
        _STATUS.pack_into(self._memory, 0, status)

    def write(self, what: object, step: int | None) -> None:
        """Write the position."""
        # One call, so that a rank that is killed leaves the old position or the new one.
        known = -1 if step is None else step
        _POSITION.pack_into(self._memory, _STATUS.size, known, str(what).encode())

    def read(self) -> tuple[str, int | None]:
        """Return the position's text, and the step."""
        step, text = _POSITION.unpack_from(self._memory, _STATUS.size)
        return text.rstrip(b"\0").decode(errors="replace"), None if step == -1 else step

    def lock(self) -> bool:
        """Return whether this process is the first to lock it, for good."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def machine() -> str:
    """Return a name that only processes share that see the same process numbers."""
    with contextlib.suppress(OSError):
        return f"{boot()}/{os.readlink('/proc/self/ns/pid')}"
    return boot()


def boot() -> str:
    """Return a name of this machine since its start; its processes share a clock."""
    with contextlib.suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.uname().nodename}/{boot_id}"
    return os.uname().nodename


def _stat(pid: int) -> tuple[str, str]:
    """Return the state and start time of a process; empty if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]

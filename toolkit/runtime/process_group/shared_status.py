"""Where a rank is, in memory that outlives it: for the other ranks of its machine."""

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
from toolkit.schedule import Action, Buffer, Instruction

_SIZE = 4096
_FATE = struct.Struct("<q")  # at 0; from 8 on: step, length of a text or -1, then it or ...
_TEXT = struct.Struct("<2q")
_INSTRUCTION = struct.Struct("<9q")  # ... an instruction with at most one peer
_TEXT_AT = 8 + _TEXT.size


class Process:
    """A process of this machine; one that has its number later is another one."""

    def __init__(self, pid: int, started: str | None = None) -> None:
        self.pid = pid
        self.started = _stat(pid)[1] if started is None else started

    @property
    def gone(self) -> bool:
        if not Path("/proc/self/stat").exists():
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
    """The position of a rank, written before every instruction: so it has to be quick."""

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
        """That of another process, where it can be had."""
        try:
            return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR))
        except (OSError, ValueError):
            return None

    @property
    def status(self) -> RankStatus:
        return RankStatus(*_FATE.unpack_from(self._memory))

    @status.setter
    def status(self, status: RankStatus) -> None:
        _FATE.pack_into(self._memory, 0, status)

    def say(self, what: object, step: int | None) -> None:
        """Be at ``what``."""
        known = -1 if step is None else step
        if type(what) is Instruction and len(what.peers) < 2:
            _, action, stage, microbatch, of_step, version, buffer, peers = what
            _INSTRUCTION.pack_into(
                self._memory,
                8,
                known,
                -1,
                action,
                stage,
                -1 if microbatch is None else microbatch,
                -1 if of_step is None else of_step,
                -1 if version is None else version,
                -1 if buffer is None else buffer,
                peers[0] if peers else -1,
            )
        else:
            text = str(what).encode()[: _SIZE - _TEXT_AT]
            _TEXT.pack_into(self._memory, 8, known, len(text))
            self._memory[_TEXT_AT : _TEXT_AT + len(text)] = text

    def read(self) -> tuple[str, int | None]:
        """What was last said, and the step. It may be being written."""
        step, length = _TEXT.unpack_from(self._memory, 8)
        if length >= 0:
            what = self._memory[_TEXT_AT : _TEXT_AT + length].decode(errors="replace")
        else:
            _, _, action, stage, *others, buffer, peer = _INSTRUCTION.unpack_from(self._memory, 8)
            microbatch, of_step, version = (None if field == -1 else field for field in others)
            try:
                does, of = Action(action), None if buffer == -1 else Buffer(buffer)
            except ValueError:
                return "an instruction", None
            peers = () if peer == -1 else (peer,)
            what = str(Instruction(0, does, stage, microbatch, of_step, version, of, peers))
        return what, None if step == -1 else step

    def take(self) -> bool:
        """Whether this process is the first that takes it. Whoever has it keeps it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def machine() -> str:
    """A name that only the processes have that see the same process numbers."""
    parts = [booted()]
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return "/".join(parts)


def booted() -> str:
    """A name of this start of this machine, whose processes share a clock."""
    parts = [os.uname().nodename]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return "/".join(parts)


def _stat(pid: int) -> tuple[str, str]:
    """The state of a process, and when it started; empty if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]

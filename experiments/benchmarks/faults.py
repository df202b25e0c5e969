"""Jobs that are started to be broken: their processes, where they are, and what is done to them.

Linux only: what is looked at from outside lies in /proc.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, TCPStore

from toolkit.errors import UserError
from toolkit.runtime.process_group.shared_status import Process, SharedStatus

_LOOK = 0.02  # seconds between looks at the processes
_PIDFD_GETFD = 438  # the system call's number, the same on every architecture since Linux 5.6
_libc = ctypes.CDLL(None, use_errno=True)

SAYS_WHEN = """\
import runpy, sys, time
said = []
def hook(event, _):
    if event == "socket.connect" and not said:
        said.append(print("connects", time.time(), flush=True))
sys.addaudithook(hook)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script that says when it first connects: what its imports take is not the time-out's."""


class Job:
    """A command, and all that it starts: known by a mark in the environment.

    Used as a context, at whose end nothing of it is left.

    Args:
        command: what is run.
        environment: variables besides those of this process.
        output: the file that all of it writes to.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> None:
        name, value = "FAILURE_BENCH", uuid.uuid4().hex
        self._mark = f"{name}={value}".encode()
        self._known: dict[tuple[int, str], Process] = {}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=dict(os.environ) | dict(environment) | {name: value},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        while left := self.running():
            for process in left:
                process.kill()
            time.sleep(_LOOK)
        self._process.wait()

    @property
    def status(self) -> int | None:
        """That with which the command has ended."""
        return self._process.poll()

    def running(self) -> list[Process]:
        """All of its processes, by number and start."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = Process(pid)
                    self._known.setdefault((pid, process.started), process)
        return [process for process in self._known.values() if not process.gone]


class Rank(NamedTuple):
    """A rank of a job that trains, from outside."""

    process: Process
    word: SharedStatus

    @property
    def place(self) -> str:
        """Where it is, or was at its end."""
        return str(self.word.read().position)

    @property
    def step(self) -> int:
        step = self.word.read().position.step
        return -1 if step is None else step


def ranks_at_work(job: Job, port: int, n_ranks: int, step: int, patience: float) -> list[Rank]:
    """All ranks, once each of them has come to ``step``; empty if they do not.

    They have told each other in the store at ``port`` which processes they are and where their
    last words lie.
    """
    end = time.monotonic() + patience

    def when(true: Callable[[], bool]) -> bool:
        while not true():
            if job.status is not None or time.monotonic() > end:
                return False
            time.sleep(_LOOK)
        return True

    if not when(lambda: _listens(port)):
        return []
    try:
        return _at_work(port, n_ranks, step, patience, when)
    except RuntimeError:  # the store is gone, and so is the job
        return []


def _at_work(
    port: int, n_ranks: int, step: int, patience: float, when: Callable[[Callable[[], bool]], bool]
) -> list[Rank]:
    store = TCPStore("localhost", port, None, False, timedelta(seconds=patience))
    beats = PrefixStore("watch", store)
    ranks: dict[int, Rank] = {}

    def all_known() -> bool:
        for rank in range(n_ranks):
            if beats.check([f"process/{rank}"]):
                _, pid, started, fd = json.loads(beats.get(f"process/{rank}"))
                word = SharedStatus.of(pid, fd)
                if word is not None:
                    ranks[rank] = Rank(Process(pid, started), word)
        return len(ranks) == n_ranks

    if when(all_known) and when(lambda: all(rank.step >= step for rank in ranks.values())):
        return [ranks[rank] for rank in range(n_ranks)]
    return []


def kill(rank: Rank, port: int) -> None:
    os.kill(rank.process.pid, signal.SIGKILL)


def stop(rank: Rank, port: int) -> None:
    os.kill(rank.process.pid, signal.SIGSTOP)


def cut(rank: Rank, port: int) -> None:
    """Shut its connections to other ranks down, but not those to the store at ``port``."""
    n_cut = 0
    for connection in _connections(rank.process.pid):
        if port not in (connection.getsockname()[1], connection.getpeername()[1]):
            connection.shutdown(socket.SHUT_RDWR)
            n_cut += 1
    if not n_cut:
        raise RuntimeError(f"process {rank.process.pid} has no connection to another rank")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("localhost", port), 1).close()
        return True
    return False


def _connections(pid: int) -> Iterator[socket.socket]:
    """Another process's connected TCP sockets, for as long as the caller looks at each."""
    process = os.pidfd_open(pid)
    try:
        for fd in map(int, os.listdir(f"/proc/{pid}/fd")):
            if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
                continue
            ours = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
            if ours < 0:
                reason = os.strerror(ctypes.get_errno())
                raise UserError(
                    f"the sockets of process {pid} cannot be had ({reason}): be root, or leave cut"
                    " out of bench.faults"
                )
            with socket.socket(fileno=ours) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and _is_connected(
                    connection
                ):
                    yield connection
    finally:
        os.close(process)


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True

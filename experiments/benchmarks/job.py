"""A job on many processes, watched from outside: its processes, and what its ranks are doing.

What is looked at lies in /proc: Linux only.
"""

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from torch.distributed import PrefixStore, TCPStore

from toolkit.errors import UserError
from toolkit.runtime.process_group.shared_status import Process, SharedStatus

_INTERVAL = 0.02  # seconds between looks at the processes
# The system call's number, the same on every architecture since Linux 5.6.
_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def torchrun(n_ranks: int, *options: str) -> list[str]:
    """Return the command that starts ``n_ranks`` ranks of the script that is added to it."""
    module = [sys.executable, "-m", "torch.distributed.run"]
    return [*module, f"--nproc-per-node={n_ranks}", *options]


class Job:
    """A command and all processes that it starts, known by a mark in their environment.

    A context, at whose end nothing of it is left. All of it writes to the file ``output``.
    """

    def __init__(
        self,
        command: Sequence[str],
        output: Path,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        # Children inherit the environment. So the mark also finds ranks whose parent has died,
        # which no tree of processes shows.
        mark = uuid.uuid4().hex
        self._mark = f"FAILURE_BENCH={mark}".encode()
        self._processes: dict[tuple[int, str], Process] = {}  # by number and start
        env = {"OMP_NUM_THREADS": "1", **os.environ, **variables, "FAILURE_BENCH": mark}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.pid = self._process.pid
        self.wait = self._process.wait

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        # Until none is left: a process may start others before it is killed.
        while processes := self.running():
            for process in processes:
                process.kill()
            time.sleep(_INTERVAL)
        self._process.wait()

    @property
    def status(self) -> int | None:
        """Exit status of the command; None while it runs."""
        return self._process.poll()

    def running(self) -> list[Process]:
        """Return all of its processes that run."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                if self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    process = Process(pid)
                    self._processes.setdefault((pid, process.started), process)
        return [process for process in self._processes.values() if not process.gone]


class Rank(NamedTuple):
    """A rank of a job that trains, from outside."""

    process: Process
    status: SharedStatus

    @property
    def place(self) -> str:
        """Where it is, or was at its end."""
        return self.status.read().position


def ranks_at_work(
    job: Job, port: int, n_ranks: int, step: int, patience: float
) -> list[Rank]:
    """Return all ranks once each of them has come to ``step``; nothing if they do not.

    Ranks find each other's process and record through the store at ``port``.
    """
    ranks: list[Rank] = []
    end = time.monotonic() + patience
    while job.status is None and time.monotonic() < end:
        # Nobody listens yet, or the job has just failed and its store with it.
        with contextlib.suppress(OSError, RuntimeError):
            ranks = ranks or _known_ranks(port, n_ranks)
        steps = [rank.status.read().step for rank in ranks]
        if ranks and all(now is not None and now >= step for now in steps):
            return ranks
        time.sleep(0.1)  # the ranks need the store themselves
    return []


def _known_ranks(port: int, n_ranks: int) -> list[Rank]:
    # Fails at once if nobody listens, where the client of a store would wait for its time-out.
    socket.create_connection(("localhost", port), 1).close()
    # Each rank writes there, for the watch of the others, its process and where its record lies.
    store = PrefixStore(
        "watch", TCPStore("localhost", port, None, False, timedelta(seconds=1))
    )
    keys = [f"process/{rank}" for rank in range(n_ranks)]
    entries = [json.loads(store.get(key)) for key in keys] if store.check(keys) else []
    ranks = []
    for _, pid, start, fd in entries:
        status = SharedStatus.of(pid, fd)
        if status is not None:
            ranks.append(Rank(Process(pid, start), status))
    return ranks


def cut(rank: Rank, port: int) -> None:
    """Shut a rank's connections to other ranks down, but not those to the store at ``port``."""
    n_cut = 0
    for connection in _connections(rank.process.pid):
        with contextlib.suppress(OSError):  # one that is not connected
            if port not in (connection.getsockname()[1], connection.getpeername()[1]):
                connection.shutdown(socket.SHUT_RDWR)
                n_cut += 1
    if not n_cut:
        raise RuntimeError(
            f"process {rank.process.pid} has no connection to another rank"
        )


def _connections(pid: int) -> Iterator[socket.socket]:
    """Yield another process's TCP sockets, each for as long as the caller looks at it."""
    process = os.pidfd_open(pid)
    try:
        for fd in map(int, os.listdir(f"/proc/{pid}/fd")):
            if not os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:"):
                continue
            # A copy of the descriptor belongs to the same socket, so that shutdown() on it cuts the
            # other process's connection.
            copied_fd = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
            if copied_fd < 0:
                reason = os.strerror(ctypes.get_errno())
                raise UserError(
                    f"sockets of process {pid}: {reason}; be root, or leave cut out of bench.faults"
                )
            with socket.socket(fileno=copied_fd) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    yield connection
    finally:
        os.close(process)

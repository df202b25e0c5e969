"""Start ranks on this machine that run a function, from a script, a test or a notebook.

The parent is in :func:`launch`; each rank, in :func:`main`, calls the function and reports.
"""

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from toolkit.errors import UserError, whole
from toolkit.runtime.process_group import join, watch
from toolkit.runtime.process_group.watch import JobFailedError, is_backend_error

OnReport = Callable[[int, Any], object]

# Not -m, which would import a second copy of the module whose state report() needs.
_BOOT = """\
import sys
connection, job, *sys.path[:] = sys.argv[1:]
del sys.argv[1:]
for stream in sys.stdout, sys.stderr:  # whole lines, since other ranks write there too
    stream.reconfigure(line_buffering=True, write_through=False)
from toolkit.runtime.process_group.launch import main
main(int(connection), job)
"""
_LOOK = 0.05  # most seconds between looks at the processes
_FAREWELL = 10.0  # most seconds to wait for the ends of ranks

# Reasons of a failure, the best first, and the seconds to wait for a better one.
_RAISED, _JOB_FAILED, _DIED, _LOST = range(4)
_PATIENCE = {_RAISED: 0.0, _JOB_FAILED: 0.5, _DIED: 3.0, _LOST: 0.5}


class RankError(RuntimeError):
    """An exception of a rank, with its traceback."""


def launch(
    function: Callable[..., Any],
    n_ranks: int,
    *args: Any,
    on_report: OnReport | None = None,
    timeout: float = 120.0,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` in ``n_ranks`` new processes, each of them a rank.

    In them :func:`toolkit.runtime.join` finds the others, :func:`toolkit.runtime.report` reaches
    this process, and their output appears where its own does. All processes end with the call.

    Args:
        function: function that each rank calls; it and its arguments are pickled, also from a
            notebook's cell.
        n_ranks: number of processes.
        *args: positional arguments of ``function``.
        on_report: function that is called here with the rank and the value of each report.
        timeout: seconds within which all ranks have to start.
        **kwargs: keyword arguments of ``function``.

    Returns:
        The value that each rank returned, ``[rank]``.

    Raises:
        UserError: an argument is invalid.
        ValueError: a rank raised it.
        RankError: a rank raised another exception.
        JobFailedError: a rank died, stalled or did not start.
    """
    n_ranks = whole(n_ranks, "n_ranks, the number of processes,", 1)
    if not timeout > 0:
        raise UserError(f"timeout is a number of seconds above 0: got {timeout}")
    job = _Job(n_ranks, on_report)
    with tempfile.NamedTemporaryFile() as file:
        try:
            cloudpickle.dump((function, args, kwargs), file)
            file.flush()
        except Exception as error:
            raise UserError(
                f"cannot pickle the function and its arguments: {error};"
                " open files and locks have to be made within the function"
            ) from error
        try:
            job.start(file.name)
            return job.results(timeout)
        finally:
            job.end()


class _Job:
    """The ranks of a call of ``launch``."""

    def __init__(self, n_ranks: int, on_report: OnReport | None) -> None:
        self._n_ranks, self._on_report = n_ranks, on_report
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._connections: dict[Any, int] = {}  # and the rank of each
        self._results: dict[int, Any] = {}
        self._missing = set(range(n_ranks))  # not yet up
        self._open = set(range(n_ranks))  # neither with a result nor failed
        self._failure: tuple[int, Exception, Exception | None] | None = None
        self._decided_at = math.inf  # when to stop waiting for a better reason of the failure

    def start(self, job: str) -> None:
        """Start the processes, and the store in which they meet."""
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),  # only this machine reaches it
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        variables = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // self._n_ranks))}
        if sys.platform == "linux":
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        variables |= os.environ
        variables |= {
            "WORLD_SIZE": str(self._n_ranks),
            "LOCAL_WORLD_SIZE": str(self._n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        print(end="", flush=True)  # what has been printed here comes before what ranks print
        for rank in range(self._n_ranks):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                self._running[rank] = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(theirs.fileno()), job, *sys.path],
                    stdin=subprocess.DEVNULL,
                    env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in a terminal is for the parent
                )
            self._connections[ours] = rank

    def results(self, timeout: float) -> list[Any]:
        """Wait for the results of all ranks, or for a failure."""
        end = time.monotonic() + timeout
        while self._open and time.monotonic() < self._decided_at:
            self._step()
            if self._missing and self._failure is None and time.monotonic() > end:
                raise JobFailedError(
                    f"rank {', '.join(map(str, sorted(self._missing)))} has not started within"
                    f" {timeout:g} s: start fewer ranks, or raise timeout"
                )
        if self._failure is not None:
            _, error, cause = self._failure
            raise error from cause
        self._await_end(_FAREWELL)
        return [self._results[rank] for rank in range(self._n_ranks)]

    def end(self) -> None:
        """Kill the processes that are left."""
        # An interrupt may have cut a message short. A connection that is closed ends its rank.
        connections, self._connections = self._connections, {}
        for process in self._running.values():
            _kill_group(process)
        self._await_end(_FAREWELL)
        for connection in connections:
            connection.close()

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            self._step()

    def _step(self) -> None:
        """Take the messages of the ranks, and note their ends; wait a little for them."""
        ended = {rank for rank, process in self._running.items() if process.poll() is not None}
        ready: list[Any] = wait([*self._connections], _LOOK)
        for connection in ready:
            rank = self._connections[connection]
            ended.discard(rank)  # its end comes after all that it has said
            try:
                message = connection.recv_bytes()
            except (EOFError, OSError):
                del self._connections[connection]
                connection.close()
            else:
                self._take(rank, *pickle.loads(message))
        for rank in ended:
            process = self._running.pop(rank)
            _kill_group(process)  # what it has started
            status = process.returncode
            if rank in self._open:
                how = f"ended with status {status} and no result"
                if status < 0:
                    how = f"was ended by signal {-status} ({signal.strsignal(-status)})"
                self._fail(rank, _DIED, JobFailedError(f"rank {rank} {how}"))

    def _take(self, rank: int, what: str, value: Any) -> None:
        """Act on a message."""
        match what:
            case "came":
                self._missing.discard(rank)
            case "reported" if self._on_report is not None:
                self._on_report(rank, value)
            case "announced":
                self._fail(None, _JOB_FAILED, JobFailedError(value))
            case "returned":
                self._open.discard(rank)
                self._results[rank] = value
            case "raised":
                self._fail(rank, *value)

    def _fail(
        self, rank: int | None, reason: int, error: Exception, cause: Exception | None = None
    ) -> None:
        """Note a reason why the job fails; ``rank`` has no result then."""
        self._open -= {rank}
        if self._failure is None or reason < self._failure[0]:
            self._failure = reason, error, cause
        self._decided_at = min(self._decided_at, time.monotonic() + _PATIENCE[reason])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


# What follows runs in the ranks.

_parent: Connection | None = None
_sending = threading.Lock()


def report(value: object) -> None:
    """Send ``value`` to the ``on_report`` of ``launch``; do nothing in any other process.

    Args:
        value: any object that can be pickled.

    Raises:
        UserError: the value cannot be pickled.
    """
    if _parent is not None:
        _send("reported", value)


def main(connection: int, job: str) -> None:
    """Run a rank.

    Args:
        connection: file descriptor of the connection to the parent.
        job: path of a file with the function and its arguments, pickled.
    """
    global _parent
    _parent = Connection(connection)
    os.register_at_fork(after_in_child=_forget_parent)
    threading.Thread(target=_end_with_parent, args=(_parent,), name="parent", daemon=True).start()
    if sys.platform == "linux":  # the thread of a stopped process does not run
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    watch.announce = lambda message: _send("announced", message)
    _send("came", None)
    try:
        function, args, kwargs = pickle.loads(Path(job).read_bytes())
        result = function(*args, **kwargs)
        join.leave()
        _send("returned", result)
    except (Exception, KeyboardInterrupt) as error:
        _send("raised", _describe(error))
        threading.Event().wait()  # the others would take this process's end for the reason


def _send(what: str, value: Any) -> None:
    assert _parent is not None
    try:
        message = cloudpickle.dumps((what, value))
    except Exception as error:
        rank, kind = os.environ["RANK"], type(value).__name__
        raise UserError(
            f"rank {rank}: cannot pickle a {kind} that is {what} ({error}); give numbers or tensors"
        ) from error
    with _sending:
        _parent.send_bytes(message)


def _describe(error: BaseException) -> tuple[int, Exception, Exception | None]:
    """Return the reason, what the parent raises for ``error``, and its cause."""
    rank = os.environ["RANK"]
    kinds = UserError, ValueError, JobFailedError
    kind = next((kind for kind in kinds if isinstance(error, kind)), None)
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    above = error.__traceback__
    if frames := above and above.tb_next:  # without this module's own
        message += "\n\n" + "".join(traceback.format_exception(type(error), error, frames))
    there = RankError(f"rank {rank}: {message}")
    reason = _LOST if is_backend_error(error) else _RAISED
    if kind is None:
        return reason, there, None
    same = kind(str(error))
    same.add_note(f"It was raised on rank {rank}.")
    return _JOB_FAILED if kind is JobFailedError else reason, same, there


def _forget_parent() -> None:
    """Detach a process forked from a rank: otherwise the connection would not end with the rank."""
    global _parent
    if _parent is not None:
        _parent.close()
    _parent = None


def _end_with_parent(parent: Connection) -> None:
    """End this process, and those that it has started, as soon as the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv_bytes()  # which never comes
    os.killpg(0, signal.SIGKILL)

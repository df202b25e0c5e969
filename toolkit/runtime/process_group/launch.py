"""Start ranks on this machine that run a function, from a script, a test or a notebook.

The parent is in :func:`launch`; each rank, in :func:`main`, calls the function and reports.
"""

import contextlib
import ctypes
import math
import mmap
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from itertools import repeat
from multiprocessing.connection import Connection
from typing import IO, Any

import cloudpickle
import torch.distributed as dist

from toolkit.errors import UserError, whole
from toolkit.runtime.process_group import join, watch
from toolkit.runtime.process_group.watch import JobFailedError, is_backend_error

OnReport = Callable[[int, Any], object]
Event = tuple[int, str, Any]  # rank, what has happened, and its value

# Not -m, which would import a second copy of the module whose state report() needs.
_BOOT = """\
import sys
connection, job, *sys.path[:] = sys.argv[1:]
del sys.argv[1:]
from toolkit.runtime.process_group.launch import main
main(int(connection), int(job))
"""
_LOOK = 0.05  # seconds to wait for an event
_GRACE = 2.0  # seconds for a rank to end after SIGTERM
_FAREWELL = 10.0  # seconds for a rank to end once all results are here

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
    this process, and their output appears here. All processes end with the call.

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
    try:
        pickled = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:
        raise UserError(
            f"cannot pickle the function and its arguments: {error};"
            " open files and locks have to be made within the function"
        ) from error
    job = _Job(n_ranks, on_report)
    try:
        job.start(pickled)
        return job.results(timeout)
    finally:
        job.end()


class _Job:
    """The ranks of a call of ``launch``."""

    def __init__(self, n_ranks: int, on_report: OnReport | None) -> None:
        self._n_ranks, self._on_report = n_ranks, on_report
        self._events: queue.Queue[Event] = queue.Queue()
        self._processes: list[subprocess.Popen[str]] = []
        self._results: dict[int, bytes] = {}
        self._missing = set(range(n_ranks))  # not yet up
        self._open = set(range(n_ranks))  # neither with a result nor failed
        self._running = set[int]()
        self._failures: list[tuple[int, int, Exception, Exception | None]] = []
        self._decided_at = math.inf  # when to stop waiting for a better reason of a failure

    def start(self, pickled: bytes) -> None:
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
        defaults = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // self._n_ranks))}
        if sys.platform == "linux":
            defaults["GLOO_SOCKET_IFNAME"] = "lo"
        variables = {
            **defaults,
            **os.environ,
            "WORLD_SIZE": str(self._n_ranks),
            "LOCAL_WORLD_SIZE": str(self._n_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        with tempfile.TemporaryFile() as file:
            file.write(pickled)
            file.flush()
            for rank in range(self._n_ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._processes.append(self._start_rank(rank, variables | own, file))
                self._running.add(rank)

    def _start_rank(
        self, rank: int, environment: dict[str, str], file: IO[bytes]
    ) -> subprocess.Popen[str]:
        """Start a rank's process, and threads that make events of its messages, output and end."""
        ours, theirs = multiprocessing.Pipe()
        with theirs:
            fds = theirs.fileno(), file.fileno()
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOT, *map(str, fds), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=environment,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C in a terminal is for the parent
            )
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None

        def read(pipe: Any, source: Iterable[tuple[str, Any]]) -> None:
            with pipe, contextlib.suppress(EOFError, OSError):
                for what, value in source:
                    self._events.put((rank, what, value))

        sources = (
            (out, zip(repeat("out"), out, strict=False)),
            (err, zip(repeat("err"), err, strict=False)),
            (ours, iter(ours.recv, None)),
        )
        readers = [threading.Thread(target=read, args=of, daemon=True) for of in sources]

        def follow() -> None:
            status = process.wait()
            _kill_group(process)  # what it has started
            for reader in readers:  # its end comes after all of its output
                reader.join(_GRACE)
            self._events.put((rank, "ended", status))

        for thread in (*readers, threading.Thread(target=follow, daemon=True)):
            thread.start()
        return process

    def results(self, timeout: float) -> list[Any]:
        """Wait for the results of all ranks, or for a failure."""
        end = time.monotonic() + timeout
        while self._open and time.monotonic() < self._decided_at:
            self._step()
            if self._missing and not self._failures and time.monotonic() > end:
                raise JobFailedError(
                    f"rank {', '.join(map(str, sorted(self._missing)))} has not started within"
                    f" {timeout:g} s: start fewer ranks, or raise timeout"
                )
        if self._failures:
            *_, error, cause = min(self._failures, key=lambda failure: failure[:2])
            raise error from cause
        self._await_end(_FAREWELL)
        return [pickle.loads(self._results[rank]) for rank in range(self._n_ranks)]

    def end(self) -> None:
        """End the processes that are left: by SIGTERM, then by SIGKILL."""
        self._on_report = None
        try:
            for process in self._processes:
                process.terminate()
            self._await_end(_GRACE)
        finally:
            for rank in self._running:
                _kill_group(self._processes[rank])
            self._await_end(_FAREWELL)

    def _await_end(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._running and time.monotonic() < end:
            self._step()

    def _step(self) -> None:
        """Take the next event, if one comes soon."""
        try:
            rank, what, value = self._events.get(timeout=_LOOK)
        except queue.Empty:
            return
        match what:
            case "out" | "err":
                stream = sys.stdout if what == "out" else sys.stderr
                print(f"rank {rank}:", value.rstrip("\n"), file=stream, flush=True)
            case "came":
                self._missing.discard(rank)
            case "report" if self._on_report is not None:
                self._on_report(rank, pickle.loads(value))
            case "announced":
                self._fail(_JOB_FAILED, JobFailedError(value))
            case "returned":
                self._open.discard(rank)
                self._results[rank] = value
            case "raised":
                self._open.discard(rank)
                self._fail(*value)
            case "ended":
                self._running.discard(rank)
                if rank in self._open:
                    self._open.discard(rank)
                    how = f"ended with status {value} and no result"
                    if value < 0:
                        how = f"was ended by signal {-value} ({signal.strsignal(-value)})"
                    self._fail(_DIED, JobFailedError(f"rank {rank} {how}"))

    def _fail(self, reason: int, error: Exception, cause: Exception | None = None) -> None:
        self._failures.append((reason, len(self._failures), error, cause))
        self._decided_at = min(self._decided_at, time.monotonic() + _PATIENCE[reason])


def _kill_group(process: subprocess.Popen[str]) -> None:
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
        _send("report", _pack(value, "what is reported"))


def main(connection: int, job: int) -> None:
    """Run a rank.

    Args:
        connection: file descriptor of the connection to the parent.
        job: file descriptor of a file with the function and its arguments, pickled.
    """
    global _parent
    _parent = Connection(connection)
    _end_with_parent(_parent)
    watch.announce = lambda message: _send("announced", message)
    _send("came", None)
    try:
        with mmap.mmap(job, 0, access=mmap.ACCESS_READ) as pickled:  # ranks share the file's offset
            os.close(job)
            function, args, kwargs = pickle.loads(pickled)
        result = function(*args, **kwargs)
        join.leave()
        packed = _pack(result, "the result")
    except (Exception, KeyboardInterrupt) as error:
        _send("raised", _describe(error))
        # Stay, since the others would take this process's end for the reason.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait()
    else:
        _send("returned", packed)


def _send(what: str, value: Any) -> None:
    with _sending:
        if _parent is not None:
            _parent.send((what, value))


def _pack(value: object, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        rank, kind = os.environ["RANK"], type(value).__name__
        raise UserError(
            f"rank {rank}: cannot pickle {what}, a {kind} ({error}); give numbers or tensors"
        ) from error


def _describe(error: BaseException) -> tuple[int, Exception, Exception | None]:
    """Return the kind of failure, what the parent raises for ``error``, and its cause."""
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


def _end_with_parent(parent: Connection) -> None:
    """End this process, and those that it has started, as soon as the parent is gone."""

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()  # which never comes
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="parent", daemon=True).start()
    if sys.platform == "linux":  # the thread of a stopped process does not run
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _forget_parent() -> None:
    """Detach a process forked from a rank."""
    global _parent
    _parent = None


os.register_at_fork(after_in_child=_forget_parent)

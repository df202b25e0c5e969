"""A rank that ``launch`` has started: it calls the function and reports to the parent."""

import contextlib
import ctypes
import mmap
import os
import pickle
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle

from toolkit.errors import UserError
from toolkit.runtime.process_group import join, watch
from toolkit.runtime.process_group.watch import JobFailedError, is_backend_error


class Raised(NamedTuple):
    """An exception, as it goes to the parent."""

    kind: type[Exception]  # closest type that the parent raises too; RuntimeError for all others
    message: str  # its text, after its type's name for those others
    traceback: str  # that and where it arose, as Python prints it; empty if not in Python code
    lost: bool  # whether it may be only the consequence of another rank's end


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


def _describe(error: BaseException) -> Raised:
    kinds = UserError, ValueError, JobFailedError
    kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
    above = error.__traceback__
    frames = above.tb_next if above is not None else None  # without this module's own
    where = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
    message = f"{type(error).__name__}: {error}" if kind is RuntimeError else str(error)
    return Raised(kind, message, where, is_backend_error(error))


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

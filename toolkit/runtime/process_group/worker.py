"""A rank that ``launch`` has started: it calls the function, and tells the parent how it goes."""

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
from toolkit.runtime.process_group import group, watch
from toolkit.runtime.process_group.watch import JobFailedError, is_backend_error


class Raised(NamedTuple):
    """An exception, as it goes to the parent.

    Attributes:
        name: of its type.
        message: what it says.
        traceback: that and where it arose, as Python prints it; empty if not in Python code.
        base: what it is, if the parent shall raise the same.
        pickled: itself, then, if that is possible.
        lost: whether it may only be the consequence of another rank's end.
    """

    name: str
    message: str
    traceback: str
    base: type[Exception] | None
    pickled: bytes
    lost: bool


_parent: Connection | None = None
_telling = threading.Lock()


def report(value: object) -> None:
    """Give ``value`` to the ``on_report`` of ``launch``, while this rank goes on.

    Does nothing in a process that is not a rank started by ``launch``.

    Raises:
        ValueError: the value cannot be pickled.
    """
    if _parent is not None:
        _tell("report", _pack(value, "what is reported"))


def main(connection: int, job: int) -> None:
    """Be a rank.

    Args:
        connection: file descriptor of the connection to the parent.
        job: file descriptor of a file with the function and its arguments, pickled.
    """
    global _parent
    _parent = Connection(connection)
    _end_with_parent(_parent)
    watch.announce = lambda message: _tell("announced", message)
    _tell("came", None)
    try:
        function, args, kwargs = _load(job)
        result = function(*args, **kwargs)
        group.leave()
        packed = _pack(result, "the result")
    except (Exception, KeyboardInterrupt) as error:
        _tell("raised", _describe(error))
        # Others would take the end of this process for the reason: the parent ends it with them.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Event().wait()
    else:
        _tell("returned", packed)


def _load(job: int) -> Any:
    with mmap.mmap(job, 0, access=mmap.ACCESS_READ) as pickled:
        os.close(job)
        return pickle.loads(pickled)


def _tell(what: str, value: Any) -> None:
    with _telling:
        if _parent is not None:
            _parent.send((what, value))


def _pack(value: object, what: str) -> bytes:
    try:
        return cloudpickle.dumps(value)
    except Exception as error:
        rank = os.environ["RANK"]
        raise UserError(
            f"rank {rank}: {what}, a {type(value).__name__}, cannot be pickled"
            f" ({error}); give what it is made of, such as numbers and tensors"
        ) from error


def _describe(error: BaseException) -> Raised:
    base = next((t for t in (ValueError, JobFailedError) if isinstance(error, t)), None)
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error) if base else b""
    above = error.__traceback__
    frames = above.tb_next if above is not None else None  # without this module's own
    where = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
    lost = is_backend_error(error)
    return Raised(type(error).__name__, str(error), where, base, pickled, lost)


def _end_with_parent(parent: Connection) -> None:
    """End this process, and those that it has started, as soon as the parent is gone."""

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            parent.recv_bytes()  # which never comes
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=listen, name="parent", daemon=True).start()
    if sys.platform == "linux":  # even a process that is stopped
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)


def _forget_parent() -> None:
    """In a process that was forked from a rank: it is not the rank."""
    global _parent
    _parent = None


os.register_at_fork(after_in_child=_forget_parent)

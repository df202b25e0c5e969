"""The process of a rank: it carries out the calls of the parent, and speaks with it."""

import contextlib
import os
import pickle
import queue
import signal
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from toolkit.errors import UserError
from toolkit.runtime.process_group import join, watch
from toolkit.runtime.process_group.watch import JobFailedError, is_backend_error

# Reasons of a failure, the best first.
RAISED, JOB_FAILED, DIED, LOST = range(4)

LEAVE = b""
"""The message with which the parent ends a rank."""

_parent: Connection | None = None
# The watch's thread announces while the main thread reports: messages must not be mixed.
_send_lock = threading.Lock()
_inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()


class RankError(RuntimeError):
    """An exception of a rank, with its traceback."""


def report(value: object) -> None:
    """Send ``value`` to the ``on_report`` of ``launch``; do nothing in any other process.

    Args:
        value: any object that can be pickled.

    Raises:
        UserError: the value cannot be pickled.
    """
    if _parent is not None:
        _send("reported", value)


def receive() -> Any:
    """Return the next value that the parent sends to this rank within a call."""
    return pickle.loads(_inbox.get())


def main(connection: Connection) -> None:
    """Carry out calls until the parent ends the rank.

    To the parent go ``(kind, value)``, pickled: ``came`` with the process, ``reported`` and
    ``returned`` with a value, ``raised`` with a failure, ``announced`` with the watch's reason.
    """
    global _parent
    _parent = connection
    os.register_at_fork(after_in_child=_forget_parent)
    # A thread of its own takes messages: it ends this process with the parent, even within a call.
    threading.Thread(
        target=_listen, args=(connection,), name="parent", daemon=True
    ).start()
    watch.announce = lambda message: _send("announced", message)
    _send("came", os.getpid())
    while True:
        message = _inbox.get()
        if message == LEAVE:
            break
        try:
            function, args, kwargs = pickle.loads(message)
            _send("returned", function(*args, **kwargs))
        except (Exception, KeyboardInterrupt) as error:
            _send("raised", _describe(error))
        # The next call may need their memory.
        function = args = kwargs = None
    join.leave()


def _send(kind: str, value: Any) -> None:
    assert _parent is not None
    try:
        message = cloudpickle.dumps((kind, value))
    except Exception as error:
        rank, type_name = os.environ["RANK"], type(value).__name__
        raise UserError(
            f"rank {rank}: cannot pickle a {type_name} that is {kind} ({error}); give"
            " numbers or tensors"
        ) from error
    with _send_lock:
        _parent.send_bytes(message)


def _describe(error: BaseException) -> tuple[int, Exception, Exception | None]:
    """Return the reason, what the parent raises for ``error``, and its cause."""
    rank = os.environ["RANK"]
    # Those that the parent raises as they are.
    kinds = (UserError, ValueError, JobFailedError)
    kind = next((kind for kind in kinds if isinstance(error, kind)), None)
    message = str(error) if kind else f"{type(error).__name__}: {error}"
    full_traceback = error.__traceback__
    if full_traceback is not None and full_traceback.tb_next is not None:
        frames = full_traceback.tb_next  # without this module's own
        message += "\n\n" + "".join(
            traceback.format_exception(type(error), error, frames)
        )

    world = join.current_world()
    place = ""
    if world is not None and world.watch.record.step is not None:
        place = f", {world.watch.record.position}"
    rank_error = RankError(f"rank {rank}{place}: {message}")
    reason = LOST if is_backend_error(error) else RAISED
    if kind is None:
        return reason, rank_error, None
    same_error = kind(str(error))
    same_error.add_note(f"It was raised on rank {rank}{place}.")
    return JOB_FAILED if kind is JobFailedError else reason, same_error, rank_error


def _forget_parent() -> None:
    """Detach a process forked from a rank: otherwise the connection would not end with the rank."""
    global _parent
    if _parent is not None:
        _parent.close()
    _parent = None


def _listen(parent: Connection) -> None:
    """Take what the parent sends at once, so that it never waits; end with the parent."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            _inbox.put(parent.recv_bytes())
    os.killpg(0, signal.SIGKILL)  # also what this process has started

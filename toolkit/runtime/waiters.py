"""Threads that wait for messages to end, so that no other thread has to."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from toolkit.runtime.message_transfer import Transfer


class PendingMessage(NamedTuple):
    """A message that has begun and not ended.

    Attributes:
        position: of its instruction in the rank's program.
        transfer: the message.
        began: when it began, by the rank's clock.
    """

    position: int
    transfer: Transfer
    began: float


PendingQueue = SimpleQueue[PendingMessage | None]
"""Messages that a thread waits for, in order; None ends the thread."""


class Waiters:
    """One thread for each queue of messages; each waits for its messages in order."""

    def __init__(self) -> None:
        # Guards the dictionary: a waiter that begins the next send may create another waiter.
        self._lock = threading.Lock()
        self._threads: dict[tuple, tuple[PendingQueue, threading.Thread]] = {}

    def put(
        self,
        name: tuple,
        message: PendingMessage,
        wait_for_all: Callable[[PendingQueue], None],
    ) -> None:
        """Let the waiter called ``name`` wait for a message.

        Args:
            name: of the waiter, which begins with its first message.
            message: a message that has begun.
            wait_for_all: function that the thread runs on its queue. Only the thread keeps it: the
                caller's memory is free as soon as the threads have ended.
        """
        with self._lock:
            if name not in self._threads:
                queue: PendingQueue = SimpleQueue()
                # Daemons: a message from a dead rank never ends, but the process must.
                thread = threading.Thread(
                    target=wait_for_all, args=(queue,), name="waiter", daemon=True
                )
                self._threads[name] = queue, thread
                thread.start()
            queue, _ = self._threads[name]
        queue.put(message)

    def close(self) -> None:
        """Let each thread end after its last message."""
        with self._lock:
            for queue, _ in self._threads.values():
                queue.put(None)

    def join(self) -> None:
        """Wait until the threads have ended. After a failure they may never."""
        # Not under the lock, for which a thread may ask until it has ended.
        for _, thread in self._threads.values():
            thread.join()

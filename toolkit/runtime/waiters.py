"""Threads that wait for messages to end, so that no other thread has to."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from toolkit.runtime.message_transfer import Transfer


class Begun(NamedTuple):
    """A message that is under way.

    Attributes:
        position: of its instruction in the rank's program.
        transfer: the message.
        began: when it began, by the rank's clock.
    """

    position: int
    transfer: Transfer
    began: float


BegunQueue = SimpleQueue[Begun | None]
"""Messages that a thread waits for, in order; None ends it."""


class Waiters:
    """One thread for each queue of messages; each waits for its messages in order."""

    def __init__(self) -> None:
        # Guards the dictionary: a waiter that begins the next send may create another waiter.
        self._lock = threading.Lock()
        self._threads: dict[tuple, tuple[BegunQueue, threading.Thread]] = {}

    def put(self, name: tuple, begun: Begun, wait_for_all: Callable[[BegunQueue], None]) -> None:
        """Let the waiter called ``name`` wait for a message.

        Args:
            name: of the waiter, which begins with its first message.
            begun: the message.
            wait_for_all: what the thread does. Only the thread keeps it: the caller's memory is
                free as soon as the threads have ended.
        """
        with self._lock:
            if name not in self._threads:
                messages: BegunQueue = SimpleQueue()
                # Daemons: a message from a dead rank never ends, but the process must.
                thread = threading.Thread(
                    target=wait_for_all, args=(messages,), name="waiter", daemon=True
                )
                self._threads[name] = messages, thread
                thread.start()
            messages, _ = self._threads[name]
        messages.put(begun)

    def close(self) -> None:
        """Let each thread end after its last message."""
        with self._lock:
            for messages, _ in self._threads.values():
                messages.put(None)

    def join(self) -> None:
        """Wait until the threads have ended. After a failure they may never."""
        for _, thread in self._threads.values():
            thread.join()

"""Waits for messages in a thread of its own."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from toolkit.runtime.links import Transfer


class Waiter:
    """Deals with transfers one after another.

    Args:
        do: waits for a transfer, of which it is told the number, and does what follows.
        failed: told the number of one that has failed, and why. The waiter ends.
    """

    def __init__(
        self,
        do: Callable[[int, Transfer], None],
        failed: Callable[[int, BaseException], None],
    ) -> None:
        self._do, self._failed = do, failed
        self._coming: SimpleQueue[tuple[int, Transfer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="waiter", daemon=True)
        self._thread.start()

    def put(self, number: int, transfer: Transfer) -> None:
        self._coming.put((number, transfer))

    def close(self) -> None:
        """End after what has been put."""
        self._coming.put(None)

    def _run(self) -> None:
        while (item := self._coming.get()) is not None:
            number, transfer = item
            try:
                self._do(number, transfer)
            except BaseException as error:
                self._failed(number, error)
                return
            del item, transfer  # or the message would live until the next one

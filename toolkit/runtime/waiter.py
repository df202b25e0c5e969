"""Waits for messages in a thread of its own."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

from toolkit.runtime.links import Transfer

Then = Callable[[int, Transfer], None]


class Waiter:
    """Waits for transfers, one after another, and says of each when it has ended.

    Args:
        then: told the number of a transfer that has ended, and the transfer.
        failed: told the number of one that has not, and why. The waiter ends.
    """

    def __init__(self, then: Then, failed: Callable[[int, BaseException], None]) -> None:
        self._then, self._failed = then, failed
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
            del item
            try:
                transfer.wait()
                self._then(number, transfer)
            except BaseException as error:
                self._failed(number, error)
                return
            del transfer

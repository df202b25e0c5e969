"""Spreads what a rank sends over time, so that its link sees an even load."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf

import torch
import torch.distributed as dist

from toolkit.runtime.streams import own_stream

_HEADROOM = 1.25

Begin = Callable[[], dist.Work | None]
"""Begins to send a chunk."""


@dataclass(order=True)
class _Message:
    urgency: int
    number: int
    begin: Sequence[Begin] = field(compare=False)
    sizes: Sequence[int] = field(compare=False)
    works: list[dist.Work | None] = field(default_factory=list, compare=False)
    begun: "Future[list[dist.Work | None]]" = field(default_factory=Future, compare=False)


class Pacer:
    """Begins chunks at a steady rate, the most urgent message's first.

    The rate is what spreads the bytes of a training step over the shortest step so far, and some
    more, so that who has been held up can catch up. Until two steps have ended nothing is held
    back.

    Args:
        device: where the messages are.

    Attributes:
        rate: bytes a second; None until it is known.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rate: float | None = None
        self._step_bytes = 0.0
        self._shortest = inf
        self._step_began: float | None = None
        self._waiting: list[_Message] = []
        self._numbers = count()
        self._changed = threading.Condition()
        self._closed = False
        self._next = -inf  # when the next chunk may begin
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
        self._thread.start()

    def begin(self, step_bytes: float) -> None:
        """A program begins, in which this rank sends so much a training step."""
        self._step_bytes = step_bytes
        self._step_began = None

    def end_step(self) -> None:
        """The rank has computed all of a training step."""
        now = time.perf_counter()
        if self._step_began is not None and self._step_bytes:
            self._shortest = min(self._shortest, now - self._step_began)
            self.rate = _HEADROOM * self._step_bytes / self._shortest
        self._step_began = now

    def put(
        self, begin: Sequence[Begin], sizes: Sequence[int], urgency: int
    ) -> "Future[list[dist.Work | None]]":
        """Begin a message's chunks, of ``sizes`` in bytes, in their turn.

        They are begun by another thread, for which the device must have made them already.

        Args:
            urgency: the smaller, the sooner.

        Returns:
            the works, once all have begun.
        """
        with self._changed:
            message = _Message(urgency, next(self._numbers), begin, sizes)
            heappush(self._waiting, message)
            self._changed.notify()
        return message.begun

    def close(self) -> None:
        """End; what waits is not sent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        # A chunk follows what its thread's stream has been given: on that of the ops, all of them.
        with own_stream(self._device):
            self._begin_all()

    def _begin_all(self) -> None:
        while (message := self._take()) is not None:
            at = len(message.works)
            try:
                message.works.append(message.begin[at]())
            except BaseException as error:
                message.begun.set_exception(error)
                continue
            if at + 1 == len(message.begin):
                message.begun.set_result(message.works)
            else:
                with self._changed:
                    heappush(self._waiting, message)
            if self.rate is not None:
                seconds = message.sizes[at] / self.rate
                # Who wakes up late may catch up by one chunk, and no more.
                self._next = max(self._next, time.monotonic() - seconds) + seconds

    def _take(self) -> _Message | None:
        """The most urgent message, when its next chunk may begin; None at the end."""
        with self._changed:
            while not self._closed:
                left = self._next - time.monotonic()
                if self._waiting and left <= 0:
                    return heappop(self._waiting)
                self._changed.wait(left if self._waiting else None)
        return None

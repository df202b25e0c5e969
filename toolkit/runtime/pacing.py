"""Spreads what a rank sends over time, so that its link has an even load."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count
from math import inf
from queue import PriorityQueue
from typing import NamedTuple

import torch
import torch.distributed as dist

from toolkit.runtime.streams import own_stream

# Rate of sending over the mean rate of a training step.
_HEADROOM = 1.25

# Begins to send a chunk, which the device has made.
Begin = Callable[[], dist.Work | None]
Works = list[dist.Work | None]


class _Message(NamedTuple):
    urgency: float  # smaller numbers begin sooner
    number: int  # unique, so that the queue compares no further
    chunks: deque[tuple[Begin, int]]  # with their bytes
    works: Works  # of the chunks that have begun
    all_works: "Future[Works]"


class Pacer:
    """Begins chunks at a steady rate, those of the most urgent message first.

    The rate spreads the bytes of a training step over the shortest step so far, with a quarter
    more, so that a delayed rank can catch up. Nothing is held back before two steps have ended.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.rate: float | None = None  # bytes a second, once it is known
        self._step_bytes = 0.0
        self._shortest = inf
        self._step_began: float | None = None
        self._waiting: PriorityQueue[_Message] = PriorityQueue()
        self._numbers = count()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
        self._thread.start()

    def begin(self, step_bytes: float) -> None:
        """Begin a program in which this rank sends ``step_bytes`` a training step."""
        self._step_bytes = step_bytes
        self._step_began = None

    def end_step(self) -> None:
        """Note that the rank has computed all of a training step."""
        now = time.perf_counter()
        if self._step_began is not None and self._step_bytes:
            # The shortest, since this pacer may itself have held up a longer one: from such steps
            # the rate would fall further and further.
            self._shortest = min(self._shortest, now - self._step_began)
            self.rate = _HEADROOM * self._step_bytes / self._shortest
        self._step_began = now

    def put(
        self, begin: Sequence[Begin], sizes: Sequence[int], urgency: float
    ) -> "Future[Works]":
        """Queue the chunks of a message; the result is their works, once all have begun.

        Args:
            begin: for each chunk, a function that begins to send it.
            sizes: bytes of each chunk.
            urgency: smaller numbers go first.
        """
        chunks = deque(zip(begin, sizes, strict=True))
        message = _Message(urgency, next(self._numbers), chunks, [], Future())
        self._waiting.put(message)
        return message.all_works

    def close(self) -> None:
        """End the thread; what waits is not sent."""
        self._closed.set()
        self.put((), (), -inf)  # wakes the thread
        self._thread.join()

    def _run(self) -> None:
        next_begin = -inf  # when the next chunk may begin
        # A chunk waits for all earlier work on its thread's stream: on the ops' own, for all ops.
        with own_stream(self._device):
            while not self._closed.wait(max(0.0, next_begin - time.monotonic())):
                message = self._waiting.get()
                if self._closed.is_set():
                    return
                begin, size = message.chunks.popleft()
                try:
                    message.works.append(begin())
                except BaseException as error:
                    # The thread that waits for the message raises it.
                    message.all_works.set_exception(error)
                    continue
                if message.chunks:
                    # A more urgent one may come before the next chunk.
                    # It keeps its number, so of equally urgent messages the first continues.
                    self._waiting.put(message)
                else:
                    message.all_works.set_result(message.works)
                if self.rate is not None:
                    seconds = size / self.rate
                    # From the planned time on, so that the mean rate holds even if this thread is
                    # late. It may catch up by one chunk, and no more: the load stays even.
                    next_begin = max(next_begin, time.monotonic() - seconds) + seconds

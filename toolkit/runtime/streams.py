"""CUDA streams for the threads that send, receive and update; on the CPU there is nothing to do.

On a GPU each thread has a stream of its own, on which it packs, awaits, unpacks and applies
messages. A thread first waits until the ops whose results it uses are done, and at the end until
its own work is done; so its reader need not wait for the device. It waits asleep: torch's default
is to poll, which takes a core a thread.

Torch hands out the same 32 streams of a GPU and priority in turn, and NCCL's are among those of
the default priority. On a shared stream a thread would wait for what NCCL waits for, which may wait
for that thread: a deadlock. So these streams have high priority, and are used again.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def finish_stream(device: torch.device) -> None:
    """Wait until ``device`` has done what this thread gave it."""
    if device.type == "cuda":
        _end_of(torch.cuda.current_stream(device)).synchronize()


def enter_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, which starts on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


_spare: "defaultdict[torch.device, list[torch.cuda.Stream]]" = defaultdict(list)


def _take(device: torch.device) -> "torch.cuda.Stream":
    """A stream that nobody else has, as long as there are no more than 32 at once."""
    try:
        return _spare[device].pop()
    except IndexError:
        return torch.cuda.Stream(device, priority=-1)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on ``device`` on a stream that only this thread uses."""
    enter_device(device)
    if device.type != "cuda":
        yield
        return
    stream = _take(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        _spare[device].append(stream)


class Streams:
    """The streams of a rank's threads; the ops are on that of the thread that makes it."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._device = device
            self._ops = torch.cuda.current_stream(device)
            self._threads = threading.local()
            self._taken: list[torch.cuda.Stream] = []

    def mark(self) -> "torch.cuda.Event | None":
        """Return an event at the end of the ops launched so far; None on the CPU."""
        return _end_of(self._ops) if self._gpu else None

    @contextmanager
    def after(self, marks: "Iterable[torch.cuda.Event | None]" = ()) -> Iterator[None]:
        """Work on this thread's stream, after ``marks``; at the end all has been done."""
        if not self._gpu:
            yield
            return
        if not hasattr(self._threads, "stream"):
            enter_device(self._device)
            self._threads.stream = _take(self._device)
            self._taken.append(self._threads.stream)
        for mark in marks:
            if mark is not None:
                mark.synchronize()
        with torch.cuda.stream(self._threads.stream):
            yield
            _end_of(self._threads.stream).synchronize()

    def close(self) -> None:
        """Give the threads' streams back, when the threads have done all their work."""
        if self._gpu:
            _spare[self._device].extend(self._taken)
            self._taken.clear()

    def lend(self, tensors: Iterable[Tensor | None]) -> None:
        """Record that the ops use ``tensors``, whose memory this thread's stream allocated.

        Otherwise the allocator could reuse it before the ops are done.
        """
        if self._gpu:
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(self._ops)


def _end_of(stream: "torch.cuda.Stream") -> "torch.cuda.Event":
    """Record a blocking event on ``stream``."""
    return stream.record_event(torch.cuda.Event(blocking=True))

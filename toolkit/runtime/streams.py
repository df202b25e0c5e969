"""CUDA streams for the threads that send, receive and update; on the CPU there is nothing to do.

On a GPU each thread has a stream of its own, on which it packs, awaits, unpacks and applies
messages. A thread first waits until the ops whose results it uses are done, and at the end until
its own work is done; so its reader need not wait for the device. It waits asleep: torch's default
is to poll, which takes a core a thread.

Torch hands out the same 32 streams of a GPU and priority in turn, and NCCL's are among those of
the default priority. On a shared stream a thread would wait for what NCCL waits for, which may wait
for that thread: a deadlock. So these streams have high priority, and are used again.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

_spare: "defaultdict[torch.device, list[torch.cuda.Stream]]" = defaultdict(list)


def enter_device(device: torch.device) -> None:
    """Make ``device`` the current one of this thread, which starts on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def current_stream(device: torch.device) -> "torch.cuda.Stream | None":
    """Return the stream on which this thread gives work to ``device``; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device)


def mark(device: torch.device) -> "torch.cuda.Event | None":
    """Return a blocking event after what this thread has given ``device``; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).record_event(
        torch.cuda.Event(blocking=True)
    )


def finish_stream(device: torch.device) -> None:
    """Wait until ``device`` has done what this thread gave it."""
    end = mark(device)
    if end is not None:
        end.synchronize()


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Work on ``device`` on a stream that only this thread uses, if at most 32 threads have one."""
    enter_device(device)
    if device.type != "cuda":
        yield
        return
    # Not tested first: another thread may take the last one in between.
    try:
        stream = _spare[device].pop()
    except IndexError:
        stream = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(stream):
        yield
    # Not after an error: it may wait for a message for ever.
    _spare[device].append(stream)


@contextmanager
def after_marks(
    device: torch.device, marks: "Iterable[torch.cuda.Event | None]" = ()
) -> Iterator[None]:
    """Work after ``marks``, on this thread's stream; at the end all has been done."""
    for end in marks:
        if end is not None:
            end.synchronize()
    yield
    finish_stream(device)

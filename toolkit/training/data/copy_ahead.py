"""Copies of batches to a GPU, each made while the training step before it computes.

::

    reading     | 0 | 1 |    | 2 |       | 3 |
    copying         | 0 | 1 |    | 2 |       | 3 |
    computing               |  step 0   |  step 1   |

Pinned memory and a stream of their own let copies and computing overlap.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from toolkit.runtime.streams import mark, own_stream
from toolkit.training.data.batches import Batch

T = TypeVar("T")
U = TypeVar("U")


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield ``batches`` of the CPU on ``device``, which on a GPU gets each one batch early.

    Args:
        batches: batches in pinned memory, if ``device`` is a GPU.
        device: device of what is yielded.
    """
    if device.type != "cuda":
        for inputs, targets in batches:
            yield inputs.to(device), targets.to(device)
        return
    if device.index is None:  # a stream needs the number of its GPU
        device = torch.device("cuda", torch.cuda.current_device())
    for copies, end in one_ahead(batches, lambda batch: _begin_copy(batch, device)):
        stream = torch.cuda.current_stream(device)
        stream.wait_event(end)  # the stream waits for the copy; this thread does not
        for copy in copies:
            # Or its memory could be reused while it is read here.
            copy.record_stream(stream)
        inputs, targets = copies
        yield inputs, targets


def one_ahead(values: Iterable[T], begin: Callable[[T], U]) -> Iterator[U]:
    """Yield ``begin(value)`` of each value, once that of the next one has been called, too."""
    begun_values: deque[U] = deque()
    for value in values:
        begun_values.append(begin(value))
        if len(begun_values) > 1:
            yield begun_values.popleft()
    yield from begun_values


def _begin_copy(
    batch: Batch, device: torch.device
) -> tuple[list[Tensor], "torch.cuda.Event"]:
    """Return the copies of a batch, and the event after which they are complete."""
    with own_stream(device):
        copies = [tensor.to(device, non_blocking=True) for tensor in batch]
        end = mark(device)
    assert end is not None
    return copies, end

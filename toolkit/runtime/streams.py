"""What is computed on the device for messages, beside what is computed for training.

On the CPU there is nothing to do. On a GPU messages are packed, unpacked and turned into updates on
a stream of their own, by threads that wait until that has been done; and before that until the ops
whose results they use have been done.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Streams:
    """The stream of a rank's messages beside that of its ops."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        if self._gpu:
            self._device = device
            self._ops = torch.cuda.current_stream(device)
            self._messages = torch.cuda.Stream(device)

    def mark(self) -> "torch.cuda.Event | None":
        """The end of what the ops have been told to do so far."""
        return self._ops.record_event() if self._gpu else None

    @contextmanager
    def beside(self, marks: "Iterable[torch.cuda.Event | None]" = ()) -> Iterator[None]:
        """Work on the stream of messages, after ``marks``; at the end all has been done."""
        if not self._gpu:
            yield
            return
        for mark in marks:
            if mark is not None:
                mark.synchronize()
        with torch.cuda.device(self._device), torch.cuda.stream(self._messages):
            yield
            self._messages.synchronize()

    def lend(self, tensors: Iterable[Tensor | None]) -> None:
        """The ops will use these, and drop them before they have been done with them."""
        if self._gpu:
            for tensor in tensors:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(self._ops)

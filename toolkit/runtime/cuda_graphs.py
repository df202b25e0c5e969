"""Records the operations that a function launches on a GPU, to launch them again at once."""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

Replay = Callable[[], object]

_Result = TypeVar("_Result")


class Recorder(Protocol):
    """Records the operations that a function launches on a device."""

    def record(self, run: Callable[[], _Result]) -> tuple[_Result, Replay]:
        """Record ``run``, which may read and write no value on the host.

        Returns:
            What ``run`` returns, tensors whose values are undefined so far; and a function that
            repeats the operations on the same memory, and so sets the values.

        Raises:
            RuntimeError: an operation waits for the device, or cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs. All share one pool of memory, since no two run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(self._device)

    def record(self, run: Callable[[], _Result]) -> tuple[_Result, Replay]:
        """See :meth:`Recorder.record`."""
        # What a recording returns stays allocated; only memory that it has freed again may serve
        # the next recording, too. So recorded steps may follow each other in any order.
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy to the device meanwhile, such as those of a data loader.
        recording = torch.cuda.graph(
            graph,
            pool=self._pool,
            stream=self._stream,
            capture_error_mode="thread_local",
        )
        outer_stream = torch.cuda.current_stream(self._device)
        try:
            with recording:
                result = run()
        except BaseException:
            # A recording that fails may leave its stream current, and its pool in use.
            torch.cuda.set_stream(outer_stream)
            self._begin_anew()
            raise
        return result, graph.replay


def recorder_for(device: torch.device | None) -> Recorder | None:
    """Return a recorder of what runs on ``device``; None if there is none, as on the CPU."""
    if device is None or device.type != "cuda":
        return None
    return CudaRecorder(device)

"""Peak memory of a stage's forward and backward, from the bytes of living tensors."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.model.kernel_work import storage_of, tensors_in
from toolkit.model.node_costs import meta_copy
from toolkit.model.precision import as_trained


class MemoryMeter(Protocol):
    """Bytes in use on a device."""

    @property
    def bytes(self) -> int:
        """Bytes in use now."""

    @property
    def most(self) -> int:
        """Peak since the last restart."""

    def restart(self) -> None:
        """Set the peak to the bytes in use now."""


class LiveMemory(TorchDispatchMode):
    """Count the bytes of living tensors made inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0  # now
        self.most = 0  # the peak since the last restart
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._count(output, tensors_in((args, kwargs)))
        return output

    def _count(self, output: Any, arguments: Sequence[Tensor]) -> None:
        """Count the memory of what an operation has made, unless it is that of an argument."""
        argument_addresses = [storage_of(tensor) for tensor in arguments]
        for tensor in tensors_in(output):
            address = storage_of(tensor)
            if address not in self._sizes and address not in argument_addresses:
                storage = tensor.untyped_storage()
                self._sizes[address] = storage.nbytes()
                self.bytes += storage.nbytes()
                # An address may be used again: forget it as soon as its storage is gone.
                weakref.finalize(storage, self._forget, address)
        self.most = max(self.most, self.bytes)

    def restart(self) -> None:
        """Set the peak to the bytes in use now."""
        self.most = self.bytes

    def _forget(self, storage: int) -> None:
        self.bytes -= self._sizes.pop(storage, 0)


def working_bytes(
    stage: fx.GraphModule,
    inputs: tuple[Tensor, ...],
    device: torch.device,
    precision: str,
) -> tuple[int, int]:
    """Return the peak bytes of a stage's forward and backward besides what is kept between them.

    Temporary results and gradients count. Arguments are as in :func:`node_costs`.
    """
    meta_stage = meta_copy(stage)

    def forward() -> tuple[Tensor, ...]:
        # An interpreter keeps the outputs alive: it must end with this call.
        outputs: tuple[Tensor, ...] = fx.Interpreter(meta_stage).run(*inputs)
        return outputs

    with LiveMemory() as memory:
        return peaks_beside_kept(forward, memory, as_trained(device, precision))


def peaks_beside_kept(
    forward: Callable[[], tuple[Tensor, ...]],
    memory: MemoryMeter,
    precision: AbstractContextManager[object],
) -> tuple[int, int]:
    """Return the peak bytes of a forward and of its backward, besides what is kept between them.

    Args:
        forward: returns the outputs of a stage, and keeps no reference to them.
        memory: meter of the device.
        precision: context of the forward.
    """
    # Bytes in use over time; the results are the heights of the two peaks above "kept"::
    #
    #               __
    #        ______|  |                 ____
    #     __|         |________________|    |__
    #        forward     kept           backward
    memory.restart()
    with precision:
        outputs = forward()
    forward_peak = memory.most
    differentiable_outputs = [output for output in outputs if output.requires_grad]
    # A backward that begins at places in the graph needs no outputs, so they can be freed: a stage
    # sends them away, too.
    edges = [get_gradient_edge(output) for output in differentiable_outputs]
    specs = [
        (output.shape, output.dtype, output.device) for output in differentiable_outputs
    ]
    del outputs, differentiable_outputs  # each reference would keep the outputs alive
    kept_bytes = memory.bytes
    memory.restart()
    # The next stage's gradients arrive before the backward begins.
    gradients = [
        torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in specs
    ]
    torch.autograd.backward(edges, gradients)
    return forward_peak - kept_bytes, memory.most - kept_bytes

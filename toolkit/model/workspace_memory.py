"""Peak workspace of a stage besides what it keeps, from live meta tensors."""

import weakref
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.model.analysis import AsTrained, meta_copy, tensors_in


class Live(TorchDispatchMode):
    """Count the bytes of living tensors made inside the context.

    Attributes:
        bytes: now.
        most: peak since the start, or since the caller last set it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        known = [tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))]
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes and storage._cdata not in known:
                self._sizes[storage._cdata] = storage.nbytes()
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata)
        self.most = max(self.most, self.bytes)
        return output

    def _forget(self, storage: int) -> None:
        self.bytes -= self._sizes.pop(storage)


def working_bytes(
    stage: fx.GraphModule, inputs: tuple[Tensor, ...], device: torch.device, precision: str
) -> tuple[int, int]:
    """Return the peak bytes of a forward and a backward besides what is kept between them.

    Temporary results and gradients count: those of the outputs, the parameters and the inputs.

    Args:
        stage: a stage of a partitioned model.
        inputs: meta tensors ``[b, ...]``; gradients are made for those that require them.
        device: device whose attention and autocast apply. Meta: a GPU.
        precision: one of :data:`toolkit.model.precision.PRECISIONS`.
    """
    run = AsTrained(meta_copy(stage), device, precision)
    with Live() as live:
        with run.computing():
            outputs = run.run(*inputs)
        of_forward = live.most
        trained = [x for x in outputs if x.requires_grad]
        edges = [get_gradient_edge(x) for x in trained]
        shapes = [(x.shape, x.dtype) for x in trained]
        del run, outputs, trained  # each reference would keep the outputs alive
        kept = live.bytes
        live.most = kept
        gradients = [torch.empty(s, dtype=t, device="meta") for s, t in shapes]
        torch.autograd.backward(edges, gradients)
        return of_forward - kept, live.most - kept

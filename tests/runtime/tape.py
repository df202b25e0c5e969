"""A double of CUDA graphs for the CPU: it records operations, and repeats them on the same memory.

Like a CUDA graph it knows no Python: it repeats what was launched, on the addresses of then, and it
refuses operations that read a value of the device.
"""

from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.runtime import single_process

SYNCHRONISING = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
}


class Tape(TorchDispatchMode):
    """While active, it records what is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple] = []
        # Recording ran the operations already; a CUDA graph would not have.
        self.has_run = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name in SYNCHRONISING:
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        result = function(*args, **kwargs)
        if not function.is_view:
            self.operations.append((function, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations, and leave their results where the first ones lie."""
        if self.has_run:
            self.has_run = False
            return
        for function, args, kwargs, result in self.operations:
            repeated = function(*args, **kwargs)
            for memory, tensor in zip(
                tree_leaves(result), tree_leaves(repeated), strict=True
            ):
                if (
                    isinstance(memory, Tensor)
                    and memory.data_ptr() != tensor.data_ptr()
                ):
                    memory.copy_(tensor)


class TapeRecorder:
    """Records tapes; see :class:`toolkit.runtime.cuda_graphs.Recorder`."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def record(self, run: Callable):
        tape = Tape()
        with tape:
            result = run()
        self.tapes.append(tape)
        return result, tape.replay


@contextmanager
def emulated_graphs(monkeypatch):
    """Let order "grouped" record and replay its steps on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(single_process, "recorder_for", lambda _: TapeRecorder())
        yield

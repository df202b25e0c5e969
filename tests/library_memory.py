"""A stand-in for a GPU's allocator: living tensors, and workspaces of convolutions."""

import torch

from toolkit.model.peak_memory import LiveMemory

FORWARD = torch.ops.aten.convolution
BACKWARD = torch.ops.aten.convolution_backward


class LibraryMemory(LiveMemory):
    """Bytes of living tensors, and of a workspace while an operation runs.

    Args:
        workspaces: bytes of workspace by operation.
    """

    def __init__(self, workspaces):
        super().__init__()
        self.workspaces = workspaces

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = super().__torch_dispatch__(func, types, args, kwargs)
        workspace = self.workspaces.get(func.overloadpacket, 0)
        self.most = max(self.most, self.bytes + workspace)
        return output

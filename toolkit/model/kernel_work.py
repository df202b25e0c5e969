"""Arithmetic and memory traffic of kernels, counted on meta tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from toolkit.model.precision import HALVES, attention_draws


@dataclass(frozen=True)
class Work:
    """Arithmetic and memory traffic of one or more kernels.

    Attributes:
        flops: floating-point operations by torch's counter; grouped convolutions by ours.
        bytes: read and written in device memory, each kernel on its own.
        in_16_bits: whether any operand has 16 bits.
    """

    flops: int
    bytes: int
    in_16_bits: bool = False


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a node's result."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def storage_of(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, which identifies it while it lives."""
    return tensor.untyped_storage()._cdata


@contextmanager
def counting_work() -> Iterator["WorkCounter"]:
    """Count the work of the operations inside the context."""
    with (
        FlopCounterMode(display=False, custom_mapping=_FLOPS) as flops,
        WorkCounter() as counter,
    ):
        yield counter
    counter.flops = flops.get_total_flops()


def _convolution_backward(*args: Any, **keywords: Any) -> int:
    """Return the operations of a convolution's backward: one forward for each gradient it computes.

    torch's formula ignores groups, and counts a depthwise convolution as a dense one.
    """
    # aten.convolution_backward(grad, x, weight, bias, stride, padding, dilation, transposed, ...)
    # These are called with shapes in place of tensors.
    gradient_shape, input_shape, weight_shape, *_, transposed, _, _, output_mask = args[
        :11
    ]
    positions = input_shape[2:] if transposed else gradient_shape[2:]
    forward_flops = 2 * input_shape[0] * prod(positions) * prod(weight_shape)
    # The mask: whether gradients of input, weight and bias are computed. That of the bias is a sum.
    return forward_flops * sum(output_mask[:2])


_FLOPS = {torch.ops.aten.convolution_backward: _convolution_backward}


class WorkCounter(TorchDispatchMode):
    """Count bytes that kernels read and write, and detect random draws; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.bytes = 0
        self.in_16_bits = False
        self.draws = False

    @property
    def work(self) -> Work:
        """What has been counted."""
        return Work(self.flops, self.bytes, self.in_16_bits)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        # Views and allocations launch no kernel.
        if not reads_memory(func):
            return output
        attention_dropout = attention_draws(func, args)
        is_seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.draws |= is_seeded if attention_dropout is None else attention_dropout
        operands = tensors_in((args, kwargs, output))
        self.bytes += sum(operand.nbytes for operand in operands)
        self.in_16_bits |= any(operand.dtype in HALVES for operand in operands)
        return output


def reads_memory(operation: Any) -> bool:
    """Return whether an operation reads or writes memory; views and allocations do not."""
    return not operation.is_view and operation not in _ALLOCATIONS


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.detach.default,
}

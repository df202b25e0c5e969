"""What the compressed bytes of a message stand for.

Floating-point tensors of a stage travel as one vector of codes, at ``CODES``; all others as they
are.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod

import torch
from torch import Tensor

from toolkit.cost.compression import LowRankCode, MessageCode
from toolkit.runtime.low_rank import factor, multiply
from toolkit.runtime.quantization import dequantize, quantize

CODES = "<codes>"  # no name of a weight
"""Place of the codes in a message."""


@dataclass(frozen=True)
class TensorForm:
    """Shape and type of a tensor.

    Attributes:
        name: of the weight.
        shape: its shape.
        dtype: its type at both ends.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CompressedForm:
    """What the compressed part of a message stands for.

    Attributes:
        tensors: sorted by name.
        code: of their numbers.
    """

    tensors: tuple[TensorForm, ...]
    code: MessageCode

    @classmethod
    def of(cls, tensors: Iterable[TensorForm], code: MessageCode) -> "CompressedForm":
        """Return the form of ``tensors`` in any order."""
        # Both ends cut the numbers by this order, and neither sends it.
        return cls(tuple(sorted(tensors, key=lambda tensor: tensor.name)), code)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each tensor."""
        return [prod(tensor.shape) for tensor in self.tensors]

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of each tensor, whose first dimension counts the rows."""
        matrices = []
        for tensor in self.tensors:
            n_rows = tensor.shape[0] if tensor.shape else 1
            matrices.append((n_rows, prod(tensor.shape[1:])))
        return matrices

    @property
    def n_bytes(self) -> int:
        """Bytes of the codes."""
        if isinstance(self.code, LowRankCode):
            return self.code.n_bytes(self.matrices)
        return self.code.n_bytes(sum(self.sizes))

    @property
    def dtype(self) -> torch.dtype:
        """Type in which numbers are compressed, and errors kept: at least 32 bits."""
        dtypes = [tensor.dtype for tensor in self.tensors]
        return reduce(torch.promote_types, dtypes, torch.float32)

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers of all tensors, ``[n]``, given by name."""
        # One vector: blocks go across the ends of tensors, so small ones need no own scale.
        pieces = [tensors[form.name].flatten().to(self.dtype) for form in self.tensors]
        if not pieces:
            return torch.empty(0, dtype=self.dtype)
        return torch.cat(pieces)

    def encode(self, numbers: Tensor) -> Tensor:
        """Return the codes of the numbers of all tensors, ``[n]``, as bytes, ``[n_bytes]``."""
        if isinstance(self.code, LowRankCode):
            return factor(numbers, self.matrices, self.code)
        return quantize(numbers, self.code)

    def numbers(self, content: Tensor) -> Tensor:
        """Return the numbers of all tensors, ``[n]``, of a message's codes."""
        if isinstance(self.code, LowRankCode):
            return multiply(content, self.matrices, self.code, self.dtype)
        return dequantize(content, sum(self.sizes), self.code, self.dtype)

    def split(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return tensors by name, of the numbers of all, ``[n]``."""
        tensors = {}
        for form, piece in zip(self.tensors, numbers.split(self.sizes), strict=True):
            tensors[form.name] = piece.view(form.shape).to(form.dtype)
        return tensors


@dataclass(frozen=True)
class CompressedMessage:
    """Tensors of a stage as they travel.

    Attributes:
        tensors: bytes at ``CODES``, and what travels as it is, by name.
        form: of the tensors in these bytes.
    """

    tensors: dict[str, Tensor]
    form: CompressedForm

    @property
    def exact(self) -> dict[str, Tensor]:
        """What travels as it is, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name != CODES}

    def numbers(self) -> Tensor:
        """Return the numbers that the codes stand for, ``[n]``."""
        return self.form.numbers(self.tensors[CODES])


def separated(
    tensors: Mapping[str, Tensor], names: Collection[str], code: MessageCode
) -> tuple[CompressedForm, dict[str, Tensor]]:
    """Return the form of what is compressed of ``tensors``, and the others by name.

    Args:
        tensors: of a message, by name.
        names: of the tensors that are compressed if their numbers are real.
        code: of their numbers.
    """
    compressed = []
    exact = {}
    for name, tensor in tensors.items():
        if name in names and tensor.is_floating_point():
            compressed.append(TensorForm(name, tuple(tensor.shape), tensor.dtype))
        else:
            exact[name] = tensor
    return CompressedForm.of(compressed, code), exact

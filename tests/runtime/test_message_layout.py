"""Layouts: what a message is made of, byte by byte."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.runtime import models
from tests.schedule.strategies import quick
from toolkit.runtime.message_layout import Layout, MessageTensor

CPU = torch.device("cpu")
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
)


@st.composite
def tensors(draw):
    """Any number of tensors, of any shape and type, with any bytes; some not contiguous."""
    found = {}
    for k in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from(DTYPES))
        highest = 1 if dtype == torch.bool else 100
        n = math.prod(shape)
        values = draw(st.lists(st.integers(0, highest), min_size=n, max_size=n))
        tensor = torch.tensor(values, dtype=dtype).view(shape)
        found[f"place {k}"] = (
            tensor.mT if tensor.dim() > 1 and draw(st.booleans()) else tensor
        )
    return found


# A message


@given(tensors())
@quick
def test_any_message(given_tensors):
    """Bit for bit, without padding, aligned; each type in one piece, to be summed at once."""
    found = Layout.of(given_tensors)
    flat = found.pack(given_tensors, CPU)
    assert found.n_bytes == sum(x.nbytes for x in given_tensors.values())
    assert (flat.shape, flat.dtype) == ((found.n_bytes,), torch.uint8)
    unpacked = found.unpack(flat)
    models.assert_same(unpacked, given_tensors, 0, 0)
    for tensor in unpacked.values():
        if tensor.numel():
            offset = tensor.data_ptr() - flat.data_ptr()
            assert offset % tensor.dtype.itemsize == 0
            assert 0 <= offset <= found.n_bytes - tensor.nbytes
    pieces = found.by_dtype(flat)
    sizes = Counter()
    for tensor in given_tensors.values():
        sizes[tensor.dtype] += tensor.numel()
    assert {piece.dtype: piece.numel() for piece in pieces} == sizes
    assert len(pieces) == len(sizes)
    for piece in pieces:
        piece.add_(piece)  # a piece shares the memory of the message
    twice = {place: tensor + tensor for place, tensor in given_tensors.items()}
    models.assert_same(found.unpack(flat), twice, 0, 0)


# Compressed


def test_a_compressed_message_by_hand():
    """What is whole keeps its type and comes first; 1 in bf16 is the upper half of 1 in float32."""
    given_tensors = {
        "small": torch.tensor([1.0, -2.0]),
        "whole": torch.tensor([1.0]),
        "wide": torch.tensor(1.0, dtype=torch.float64),
    }
    found = Layout.of(given_tensors, torch.bfloat16, exact=["whole"])
    assert found.tensors == (
        MessageTensor("whole", (1,), torch.float32, torch.float32),
        MessageTensor("small", (2,), torch.float32, torch.bfloat16),
        MessageTensor("wide", (), torch.float64, torch.bfloat16),
    )
    assert found.n_bytes == 4 + 2 * 2 + 2
    flat = found.pack(given_tensors, CPU)
    assert flat.tolist() == [
        *(0, 0, 0x80, 0x3F),
        *(0x80, 0x3F),
        *(0, 0xC0),
        *(0x80, 0x3F),
    ]


def sent_as(found):
    return {part.place: part.sent_as for part in found.tensors}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_small_and_complex_weights_are_not_compressed(dtype):
    for wire in (torch.bfloat16, torch.float16):
        found = Layout.of(dict(nn.Linear(3, 2, dtype=dtype).named_parameters()), wire)
        assert set(sent_as(found).values()) == {dtype}

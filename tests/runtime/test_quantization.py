"""Codes of blocks: the memory traffic with which they are priced."""

import pytest
import torch

from toolkit.cost.compression import BLOCK, BLOCK_CODES
from toolkit.model.kernel_work import counting_work
from toolkit.runtime.quantization import dequantize, encode_with_error, quantize

NUMBERS = torch.linspace(-1, 1, 1000 * BLOCK)


@pytest.mark.parametrize("code", BLOCK_CODES.values(), ids=BLOCK_CODES)
def test_kernels_pass_over_numbers_as_often_as_is_priced(code):
    def encode(numbers):
        return quantize(numbers, code)

    def decode(content):
        return dequantize(content, len(NUMBERS), code, NUMBERS.dtype)

    def passes_of(function, *arguments):
        with counting_work() as counter:
            function(*arguments)
        return counter.bytes / NUMBERS.nbytes

    with_error = passes_of(encode_with_error, NUMBERS, NUMBERS, encode, decode)
    assert passes_of(encode, NUMBERS) == pytest.approx(code.encode_passes, rel=0.01)
    assert passes_of(decode, encode(NUMBERS)) == pytest.approx(
        code.decode_passes, rel=0.01
    )
    assert with_error == pytest.approx(code.encode_passes_with_error, rel=0.01)

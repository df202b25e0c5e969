"""Codes of blocks: the memory traffic with which they are priced."""

import pytest
import torch

from toolkit.cost.compression import BLOCK, BLOCK_CODES
from toolkit.model.kernel_work import counting_work
from toolkit.runtime.quantization import dequantize, encode_with_error, quantize

N = 1000 * BLOCK


@pytest.mark.parametrize("code", BLOCK_CODES.values(), ids=BLOCK_CODES)
def test_kernels_pass_over_numbers_as_often_as_is_priced(code):
    numbers = torch.linspace(-1, 1, N)

    def decode(content):
        return dequantize(content, N, code, numbers.dtype)

    with counting_work() as encoding:
        content, _ = encode_with_error(
            numbers, numbers, lambda numbers: quantize(numbers, code), decode
        )
    with counting_work() as decoding:
        decode(content)
    assert encoding.bytes / numbers.nbytes == pytest.approx(
        code.encode_passes, rel=0.01
    )
    assert decoding.bytes / numbers.nbytes == pytest.approx(
        code.decode_passes, rel=0.01
    )

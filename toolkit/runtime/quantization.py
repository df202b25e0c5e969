"""Block-wise quantisation: numbers of a tensor as integers of few bits, with a scale a block.

::

    scale_b = max |x_i| / c    over the block b of BLOCK numbers, in 32 bits; c = 127 or 7
    code_i  = round(x_i / scale_b)
    x_i     is read as scale_b code_i, which is within scale_b / 2 of it

Source: block-wise dynamic quantisation as in arXiv 2110.02861, section 2.1, with linear codes.
"""

import torch
from torch import Tensor

from toolkit.cost.compression import BLOCK, SCALE_BYTES

LARGEST_CODES = {8: 127, 4: 7}
"""Largest code, by bits of a number."""


@torch.no_grad()
def quantize(numbers: Tensor, bits: int) -> Tensor:
    """Return the scales and codes of ``numbers`` as bytes, ``[quantized_bytes(n, bits)]``.

    A block that has a number that is not finite is read as numbers that are not finite.

    Args:
        numbers: ``[n]``, of a floating-point type.
        bits: of a code, 8 or 4.
    """
    blocks = _in_blocks(numbers)
    largest_code = LARGEST_CODES[bits]
    scales = (blocks.abs().amax(1) / largest_code).to(torch.float32)
    divisors = scales.to(numbers.dtype)[:, None]
    # A block of zeros has scale 0. A scale is rounded to 32 bits, so the largest number may be
    # slightly more than the largest code.
    quotients = torch.where(divisors == 0, 0.0, blocks / divisors)
    codes = quotients.round().nan_to_num(0.0).clamp(-largest_code, largest_code)
    # An infinite scale reads code 0 as NaN: no number of the block is taken for a finite one.
    codes = codes.to(torch.int8).flatten()[: len(numbers)]
    if bits == 4:
        codes = _packed(codes)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


@torch.no_grad()
def dequantize(
    content: Tensor, n_numbers: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """Return the numbers, ``[n_numbers]``, of the bytes that :func:`quantize` returned.

    Args:
        content: ``[quantized_bytes(n_numbers, bits)]`` bytes.
        n_numbers: how many numbers were quantised.
        bits: of a code, 8 or 4.
        dtype: type of the numbers.
    """
    n_blocks = -(-n_numbers // BLOCK)
    # A copy: a view as 32-bit numbers needs an address that 4 divides.
    scales = content[: n_blocks * SCALE_BYTES].clone().view(torch.float32)
    codes = content[n_blocks * SCALE_BYTES :].view(torch.int8)
    if bits == 4:
        codes = _unpacked(codes)
    # Without the code that fills the last byte if their number is odd.
    blocks = _in_blocks(codes[:n_numbers].to(dtype))
    return (blocks * scales.to(dtype)[:, None]).flatten()[:n_numbers]


@torch.no_grad()
def quantize_with_error(
    numbers: Tensor, error: Tensor | None, bits: int
) -> tuple[Tensor, Tensor]:
    """Return the bytes of ``numbers`` plus ``error``, and what they lose, ``[n]``.

    Args:
        numbers: ``[n]``, of a floating-point type.
        error: ``[n]``, what the message before lost; None: nothing.
        bits: of a code, 8 or 4.
    """
    if error is not None:
        numbers = numbers + error.to(numbers)
    content = quantize(numbers, bits)
    new_error = numbers - dequantize(content, len(numbers), bits, numbers.dtype)
    # An update that is not finite may be skipped: later messages must not inherit it.
    return content, new_error.nan_to_num(0.0, 0.0, 0.0)


def _in_blocks(numbers: Tensor) -> Tensor:
    """Return ``numbers`` as ``[n_blocks, BLOCK]``, with zeros at the end."""
    n_missing = -len(numbers) % BLOCK
    return torch.nn.functional.pad(numbers, (0, n_missing)).view(-1, BLOCK)


def _packed(codes: Tensor) -> Tensor:
    """Return two codes a byte: the first in the low bits."""
    pairs = torch.nn.functional.pad(codes, (0, len(codes) % 2)).view(-1, 2)
    return (pairs[:, 0] & 15) | (pairs[:, 1] << 4)


def _unpacked(pairs: Tensor) -> Tensor:
    """Return the codes of :func:`_packed`, with their signs."""
    low_codes = (pairs << 4) >> 4  # shifts of signed bytes keep the sign
    return torch.stack([low_codes, pairs >> 4], 1).flatten()

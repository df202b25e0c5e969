"""Block-wise codes: numbers of a tensor as integers of few bits, with a scale a block.

::

    scale_b = max |x_i| / c    over the block b of BLOCK numbers, in 32 bits; c = 127 or 7
    code_i  = round(x_i / scale_b)
    x_i     is read as scale_b code_i, which is within scale_b / 2 of it

``topk`` does so with the largest numbers of each block, and sends their places; the others are
read as 0. Bytes of a message::

    scale of each block | codes of block 0 | codes of block 1 | ..
    topk:                 places and codes of block 0 | of block 1 | ..

Source: block-wise dynamic quantisation as in arXiv 2110.02861, section 2.1, with linear codes;
the largest numbers, with feedback of the others, as in arXiv 1809.07599, algorithm 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from toolkit.cost.compression import BLOCK, SCALE_BYTES, BlockCode

LARGEST_CODES = {8: 127, 4: 7}
"""Largest code, by bits of a number."""


@torch.no_grad()
def quantize(numbers: Tensor, code: BlockCode) -> Tensor:
    """Return the scales and codes of ``numbers`` as bytes, ``[code.n_bytes(n)]``.

    A block that has a number that is not finite is read as numbers that are not finite, those that
    are sent.

    Args:
        numbers: ``[n]``, of a floating-point type.
        code: how they are written.
    """
    blocks = _in_blocks(numbers)
    places = None
    if not code.keeps_all:
        # NaN counts as the largest. Places are sorted, so that equal numbers give equal bytes.
        places = blocks.abs().topk(code.n_kept, sorted=False).indices.sort(1).values
        blocks = blocks.gather(1, places)
    largest_code = LARGEST_CODES[code.bits]
    scales = (blocks.abs().amax(1) / largest_code).to(torch.float32)
    divisors = scales.to(numbers.dtype)[:, None]
    # A block of zeros has scale 0. A scale is rounded to 32 bits, so the largest number may be
    # slightly more than the largest code.
    quotients = torch.where(divisors == 0, 0.0, blocks / divisors)
    codes = quotients.round().nan_to_num(0.0).clamp(-largest_code, largest_code)
    # An infinite scale reads code 0 as NaN: no number of the block is taken for a finite one.
    codes = codes.to(torch.int8)
    if places is not None:
        codes = torch.cat([places.to(torch.uint8).view(torch.int8), codes], 1).flatten()
    else:
        codes = codes.flatten()[: len(numbers)]
    if code.bits == 4:
        codes = _packed(codes)
    return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])


@torch.no_grad()
def dequantize(
    content: Tensor, n_numbers: int, code: BlockCode, dtype: torch.dtype
) -> Tensor:
    """Return the numbers, ``[n_numbers]``, of the bytes that :func:`quantize` returned.

    Args:
        content: ``[code.n_bytes(n_numbers)]`` bytes.
        n_numbers: how many numbers were written.
        code: how they were written.
        dtype: type of the numbers.
    """
    n_blocks = -(-n_numbers // BLOCK)
    # A copy: a view as 32-bit numbers needs an address that 4 divides.
    scales = content[: n_blocks * SCALE_BYTES].clone().view(torch.float32)
    codes = content[n_blocks * SCALE_BYTES :].view(torch.int8)
    if not code.keeps_all:
        places, codes = codes.view(n_blocks, 2, code.n_kept).unbind(1)
        blocks = torch.zeros(n_blocks, BLOCK, dtype=dtype, device=content.device)
        sent = codes.to(dtype) * scales.to(dtype)[:, None]
        blocks.scatter_(1, places.contiguous().view(torch.uint8).long(), sent)
        return blocks.flatten()[:n_numbers]
    if code.bits == 4:
        codes = _unpacked(codes)
    # Without the code that fills the last byte if their number is odd.
    blocks = _in_blocks(codes[:n_numbers].to(dtype))
    return (blocks * scales.to(dtype)[:, None]).flatten()[:n_numbers]


@torch.no_grad()
def encode_with_error(
    numbers: Tensor,
    error: Tensor | None,
    encode: Callable[[Tensor], Tensor],
    decode: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the bytes of ``numbers`` plus ``error``, and what they lose, ``[n]``.

    Args:
        numbers: ``[n]``, of a floating-point type.
        error: ``[n]``, what the message before lost; None: nothing.
        encode: writes numbers as bytes.
        decode: reads them, ``[n]`` of the type of ``numbers``.
    """
    if error is not None:
        numbers = numbers + error.to(numbers)
    content = encode(numbers)
    new_error = numbers - decode(content)
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

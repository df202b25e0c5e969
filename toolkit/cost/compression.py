"""Bytes of compressed messages."""

from dataclasses import replace

from toolkit.cost.stage_costs import Costs
from toolkit.errors import check_choice

BLOCK = 256
"""Numbers that share a scale."""

GRADIENT_BITS = {"int8": 8, "int4": 4}
"""Bits of a gradient in a message, by the name of the compression."""

SCALE_BYTES = 4
"""Bytes of a scale."""


def quantized_bytes(n_numbers: int, bits: int) -> int:
    """Return the bytes of numbers of ``bits`` each, with a scale a block of ``BLOCK``."""
    n_blocks = -(-n_numbers // BLOCK)
    return n_blocks * SCALE_BYTES + -(-n_numbers * bits // 8)


def compressed_costs(costs: Costs, compression: str, item_bytes: int = 4) -> Costs:
    """Return ``costs`` whose gradients travel compressed, where ranks hand them on.

    Args:
        costs: one entry per stage.
        compression: ``int8`` or ``int4``, as of :class:`toolkit.runtime.Distributed`; or ``none``.
        item_bytes: bytes of a number of the parameters.

    Raises:
        UserError: the compression is unknown.
    """
    check_choice("compression", compression, ("none", *GRADIENT_BITS))
    if compression == "none":
        return costs
    compressed = []
    for cost in costs:
        n_numbers = round(cost.parameter_bytes / item_bytes)
        n_bytes = quantized_bytes(n_numbers, GRADIENT_BITS[compression])
        sent = n_bytes + cost.statistics_bytes
        compressed.append(replace(cost, compressed_gradient_bytes=float(sent)))
    return tuple(compressed)

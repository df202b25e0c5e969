"""Bytes of compressed messages, the memory of what they lost, and what that means for accuracy."""

from dataclasses import replace

from toolkit.cost.stage_costs import Costs
from toolkit.errors import check_choice

BLOCK = 256
"""Numbers that share a scale."""

GRADIENT_BITS = {"int8": 8, "int4": 4}
"""Bits of a gradient in a message, by the name of the compression."""

SCALE_BYTES = 4
"""Bytes of a scale."""

SIXTEEN_BITS = ("fp16", "bf16")
"""Compressions that round gradients and weights to two bytes."""

COMPRESSIONS = ("none", *SIXTEEN_BITS, *GRADIENT_BITS)
"""Compressions of a program's own messages."""


def quantized_bytes(n_numbers: int, bits: int) -> int:
    """Return the bytes of numbers of ``bits`` each, with a scale a block of ``BLOCK``."""
    n_blocks = -(-n_numbers // BLOCK)
    return n_blocks * SCALE_BYTES + -(-n_numbers * bits // 8)


def compressed_costs(costs: Costs, compression: str, item_bytes: int = 4) -> Costs:
    """Return ``costs`` whose gradients, and weights in 16 bits, travel compressed between ranks.

    Args:
        costs: one entry per stage.
        compression: as of :class:`toolkit.runtime.Distributed`. ``fp16`` and ``bf16`` are of
            gradients and weights, ``int8`` and ``int4`` of gradients alone, which ranks hand on.
        item_bytes: bytes of a number of the parameters.

    Raises:
        UserError: the compression is unknown.
    """
    check_choice("compression", compression, COMPRESSIONS)
    if compression == "none":
        return costs
    compressed = []
    for cost in costs:
        if compression in SIXTEEN_BITS:
            half_bytes = cost.parameter_bytes * min(1.0, 2 / item_bytes)
            compressed_cost = replace(
                cost,
                compressed_gradient_bytes=half_bytes + cost.statistics_bytes,
                compressed_weight_bytes=half_bytes,
            )
        else:
            n_numbers = round(cost.parameter_bytes / item_bytes)
            n_bytes = quantized_bytes(n_numbers, GRADIENT_BITS[compression])
            compressed_cost = replace(
                cost,
                compressed_gradient_bytes=float(n_bytes + cost.statistics_bytes),
                error_bytes=cost.parameter_bytes,
            )
        compressed.append(compressed_cost)
    return tuple(compressed)


def accuracy_class(compression: str, *, is_late: bool) -> str:
    """Return in a few words how training differs from plain data parallelism.

    Args:
        compression: of the messages.
        is_late: whether some weights are read late.
    """
    words = []
    if is_late:
        words.append("late weights")
    if compression in SIXTEEN_BITS:
        words.append("16-bit messages")
    elif compression == "powersgd":
        words.append("low rank with error feedback")
    elif compression in GRADIENT_BITS:
        words.append(f"{GRADIENT_BITS[compression]} bits with error feedback")
    return ", ".join(words) or "exact"

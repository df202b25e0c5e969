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


def sends_differences(state: str) -> bool:
    """Whether weights in 8 or 4 bits travel as differences to the version before.

    Args:
        state: of the schedule. Only where it is ``replicated`` a receiver keeps that version.
    """
    return state == "replicated"


def weight_bits(bits: int, *, differences: bool) -> int:
    """Return the bits of a weight in a message, for gradients of ``bits``.

    Weights that are no differences take 8: to 4 bits they would lose too much.
    """
    return bits if differences else 8


def compressed_costs(
    costs: Costs, compression: str, item_bytes: int = 4, state: str = "replicated"
) -> Costs:
    """Return ``costs`` whose gradients and weights travel compressed between ranks.

    Args:
        costs: one entry per stage.
        compression: as of :class:`toolkit.runtime.Distributed`.
        item_bytes: bytes of a number of the parameters.
        state: of the schedule.

    Raises:
        UserError: the compression is unknown.
    """
    check_choice("compression", compression, COMPRESSIONS)
    if compression == "none":
        return costs
    compressed = []
    for cost in costs:
        if compression in SIXTEEN_BITS:
            # A model in 16 bits sends the same bytes. Statistics of norms keep their own type.
            half_bytes = cost.parameter_bytes * min(1.0, 2 / item_bytes)
            compressed_cost = replace(
                cost,
                compressed_gradient_bytes=half_bytes + cost.statistics_bytes,
                compressed_weight_bytes=half_bytes,
            )
        else:
            n_numbers = round(cost.parameter_bytes / item_bytes)
            bits = GRADIENT_BITS[compression]
            differences = sends_differences(state)
            bits_of_weight = weight_bits(bits, differences=differences)
            # The sender keeps what rounding lost and adds it to its next message, so it keeps one
            # number for each gradient.
            n_bytes = quantized_bytes(n_numbers, bits)
            compressed_cost = replace(
                cost,
                compressed_gradient_bytes=float(n_bytes + cost.statistics_bytes),
                compressed_weight_bytes=float(
                    quantized_bytes(n_numbers, bits_of_weight)
                ),
                error_bytes=cost.parameter_bytes,
                # Weights in a message are rounded, so that their owner updates an exact copy.
                exact_weight_bytes=cost.parameter_bytes,
                weight_differences=differences,
            )
        compressed.append(compressed_cost)
    return tuple(compressed)


def coarseness(compression: str) -> int:
    """Return how coarsely messages are rounded: 0, not at all; 1, to 16 bits; 2, 8; 3, 4."""
    if compression in SIXTEEN_BITS:
        return 1
    return {"none": 0, "int8": 2, "int4": 3}[compression]


def accuracy_class(
    compression: str, *, is_late: bool, state: str = "replicated"
) -> str:
    """Return in a few words how training differs from plain data parallelism.

    Args:
        compression: of the messages.
        is_late: whether some weights are read late.
        state: of the schedule.
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
        if not sends_differences(state):
            words.append("weights rounded to 8 bits")
    return ", ".join(words) or "exact"

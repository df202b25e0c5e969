"""Bytes of compressed messages, the memory of what they lost, and what that means for accuracy."""

from dataclasses import dataclass, replace

from toolkit.cost.stage_costs import Costs
from toolkit.errors import check_choice

BLOCK = 256
"""Numbers that share a scale."""

SCALE_BYTES = 4
"""Bytes of a scale."""


@dataclass(frozen=True)
class MessageCode:
    """How the numbers of a message are written, in blocks of ``BLOCK`` that share a scale.

    Attributes:
        name: of the compression.
        bits: of a number that is sent.
        n_kept: numbers of a block that are sent, the largest; each also sends its place in the
            block, a byte, unless all are sent.
    """

    name: str
    bits: int
    n_kept: int = BLOCK

    @property
    def keeps_all(self) -> bool:
        """Whether every number is sent."""
        return self.n_kept == BLOCK

    def n_bytes(self, n_numbers: int) -> int:
        """Return the bytes of ``n_numbers`` in a message."""
        n_blocks = -(-n_numbers // BLOCK)
        scale_bytes = n_blocks * SCALE_BYTES
        if self.keeps_all:
            return scale_bytes + -(-n_numbers * self.bits // 8)
        return scale_bytes + n_blocks * self.n_kept * (1 + self.bits // 8)


MESSAGE_CODES = {
    code.name: code
    for code in (
        MessageCode("int8", 8),
        MessageCode("int4", 4),
        MessageCode("topk", 8, n_kept=16),
    )
}
"""Codes of gradients in messages, by the name of the compression."""

SIXTEEN_BITS = ("fp16", "bf16")
"""Compressions that round gradients and weights to two bytes."""

COMPRESSIONS = ("none", *SIXTEEN_BITS, *MESSAGE_CODES)
"""Compressions of a program's own messages."""


def sends_differences(state: str) -> bool:
    """Whether weights in messages of codes travel as differences to the version before.

    Args:
        state: of the schedule. Only where it is ``replicated`` a receiver keeps that version.
    """
    return state == "replicated"


def weight_code(code: MessageCode, *, differences: bool) -> MessageCode:
    """Return the code of weights in a message, for gradients in ``code``.

    Weights that are no differences take 8 bits: with fewer they would lose too much.
    """
    return code if differences else MESSAGE_CODES["int8"]


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
            code = MESSAGE_CODES[compression]
            differences = sends_differences(state)
            # The sender keeps what rounding lost and adds it to its next message, so it keeps one
            # number for each gradient.
            n_bytes = code.n_bytes(n_numbers)
            weight_bytes = weight_code(code, differences=differences).n_bytes(n_numbers)
            compressed_cost = replace(
                cost,
                compressed_gradient_bytes=float(n_bytes + cost.statistics_bytes),
                compressed_weight_bytes=float(weight_bytes),
                error_bytes=cost.parameter_bytes,
                # Weights in a message are rounded, so that their owner updates an exact copy.
                exact_weight_bytes=cost.parameter_bytes,
                weight_differences=differences,
            )
        compressed.append(compressed_cost)
    return tuple(compressed)


def coarseness(compression: str) -> int:
    """Return how coarse messages are: 0, exact; 1, 16 bits; 2, 8; 3, 4; 4, some numbers alone."""
    if compression in SIXTEEN_BITS:
        return 1
    return {"none": 0, "int8": 2, "int4": 3, "topk": 4}[compression]


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
    elif compression in MESSAGE_CODES:
        code = MESSAGE_CODES[compression]
        sent = f"{code.bits} bits"
        if not code.keeps_all:
            sent = f"{code.n_kept} of {BLOCK} numbers"
        words.append(f"{sent} with error feedback")
        if not sends_differences(state):
            words.append("weights rounded to 8 bits")
    return ", ".join(words) or "exact"

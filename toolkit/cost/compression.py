"""Bytes and time of compressed messages, memory of what they lost, and their class of accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.errors import UserError, check_choice
from toolkit.model.kernel_work import Work

BLOCK = 256
"""Numbers that share a scale."""

SCALE_BYTES = 4
"""Bytes of a scale."""

FACTOR_BYTES = 4
"""Bytes of a number of a low-rank factor, and of what travels with the factors."""

CODED_ITEM_BYTES = 4
"""Bytes of a number while it is encoded or decoded."""

SUM_PASSES = 3
"""Times that all numbers are read or written where a message is added to something."""

_ERROR_PASSES = 8  # 3 for the numbers + their last error, 5 for the new one

# M Q and M^T P in each of two iterations, and P Q^T of the sum that is sent, of the one that comes,
# and of the weights that come: see toolkit.runtime.low_rank.
_PRODUCTS = 7
# Each product passes over the numbers once. What comes, a sum and weights, is added to something.
_LOW_RANK_PASSES = _ERROR_PASSES + _PRODUCTS + 2 * SUM_PASSES
_LEAST_RATE = 2  # torch's: a matrix that would shrink by less travels as it is


@dataclass(frozen=True)
class BlockCode:
    """How the numbers of a message are written, in blocks of ``BLOCK`` that share a scale.

    Attributes:
        name: of the compression.
        bits: of a number that is sent.
        encode_passes: times that all numbers are read or written, as 32-bit numbers, to write a
            message.
        decode_passes: likewise to read one.
        n_kept: numbers of a block that are sent, the largest; each also sends its place in the
            block, a byte, unless all are sent.
    """

    name: str
    bits: int
    encode_passes: float
    decode_passes: float
    n_kept: int = BLOCK

    @property
    def encode_passes_with_error(self) -> float:
        """Passes until a message and what it lost are computed."""
        return self.encode_passes + self.decode_passes + _ERROR_PASSES

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


@dataclass(frozen=True)
class LowRankCode:
    """How the matrices of a message are written: as two factors of few columns, in 32 bits.

    Attributes:
        name: of the compression.
        rank: columns of each factor, at most.
    """

    name: str
    rank: int

    def n_bytes(self, matrices: Sequence[tuple[int, int]]) -> int:
        """Return the bytes of matrices of so many rows and columns in a message."""
        return FACTOR_BYTES * low_rank_numbers(matrices, self.rank)


MessageCode = BlockCode | LowRankCode
"""How the numbers of a message are written."""

BLOCK_CODES = {
    code.name: code
    for code in (
        # Passes are those of the kernels of toolkit.runtime.quantization, each on its own.
        BlockCode("int8", 8, encode_passes=16.8, decode_passes=5.3),
        BlockCode("int4", 4, encode_passes=17.9, decode_passes=6.5),
        BlockCode("topk", 8, encode_passes=7.9, decode_passes=3.6, n_kept=16),
    )
}
"""Codes that take numbers of any shape, by the name of the compression."""

LOW_RANK = LowRankCode("low_rank", rank=4)

MESSAGE_CODES: dict[str, MessageCode] = {**BLOCK_CODES, LOW_RANK.name: LOW_RANK}
"""Codes of gradients in messages, by the name of the compression."""

SIXTEEN_BITS = ("fp16", "bf16")
"""Compressions that round gradients and weights to two bytes."""

COMPRESSIONS = ("none", *SIXTEEN_BITS, *MESSAGE_CODES)
"""Compressions of a program's own messages."""


def factor_columns(n_rows: int, n_columns: int, rank: int) -> int:
    """Return the columns of a matrix's low-rank factors; 0 if it travels as it is.

    Source: :func:`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook`.
    """
    rank = min(n_rows, n_columns, rank)
    if rank * (n_rows + n_columns) * _LEAST_RATE < n_rows * n_columns:
        return rank
    return 0


def low_rank_numbers(matrices: Sequence[tuple[int, int]], rank: int) -> int:
    """Return the numbers that stand for matrices of so many rows and columns."""
    n_sent = 0
    for n_rows, n_columns in matrices:
        n_factor_columns = factor_columns(n_rows, n_columns, rank)
        if n_factor_columns:
            n_sent += n_factor_columns * (n_rows + n_columns)
        else:
            n_sent += n_rows * n_columns
    return n_sent


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
        UserError: the compression is unknown, or needs shapes that ``costs`` do not have.
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
            code = MESSAGE_CODES[compression]
            differences = sends_differences(state)
            # The sender keeps what rounding lost and adds it to its next message, so it keeps one
            # number for each gradient.
            n_bytes = _coded_bytes(cost, code, item_bytes)
            code_of_weights = weight_code(code, differences=differences)
            weight_bytes = _coded_bytes(cost, code_of_weights, item_bytes)
            compressed_cost = replace(
                cost,
                coding=_coding_work(cost, code, item_bytes),
                compressed_gradient_bytes=float(n_bytes + cost.statistics_bytes),
                compressed_weight_bytes=float(weight_bytes),
                error_bytes=cost.parameter_bytes,
                # Weights in a message are rounded, so that their owner updates an exact copy.
                exact_weight_bytes=cost.parameter_bytes,
                weight_differences=differences,
            )
        compressed.append(compressed_cost)
    return tuple(compressed)


def _coded_bytes(cost: StageCost, code: MessageCode, item_bytes: int) -> int:
    """Return the bytes of a stage's parameters in a message of ``code``."""
    if isinstance(code, BlockCode):
        return code.n_bytes(round(cost.parameter_bytes / item_bytes))
    check_matrices(cost, code.name)
    return code.n_bytes(cost.matrices)


def check_matrices(cost: StageCost, compression: str) -> None:
    """Raise UserError if a compression by low rank lacks the shapes of a stage's parameters."""
    if cost.parameter_bytes and not cost.matrices:
        raise UserError(
            f"compression={compression} needs the shapes of the parameters: give a model, not its"
            " costs"
        )


def _coding_work(cost: StageCost, code: MessageCode, item_bytes: int) -> Work:
    """Return the work of a stage's messages in a step, on a rank that hands its sum on."""
    n_numbers = cost.parameter_bytes / item_bytes
    if isinstance(code, BlockCode):
        # The sum that is sent, the one that comes, and weights that come.
        n_passes = code.encode_passes_with_error
        n_passes += 2 * (code.decode_passes + SUM_PASSES)
        return Work(flops=0, bytes=round(n_passes * CODED_ITEM_BYTES * n_numbers))
    return Work(
        flops=round(2 * _PRODUCTS * code.rank * n_numbers),
        bytes=round(_LOW_RANK_PASSES * cost.parameter_bytes),
    )


def coarseness(compression: str) -> int:
    """Return how coarse messages are.

    0: exact; 1: 16 bits; 2: 8; 3: 4; 4: some numbers alone; 5: low rank.
    """
    if compression in SIXTEEN_BITS:
        return 1
    return {"none": 0, "int8": 2, "int4": 3, "topk": 4, "low_rank": 5}[compression]


def accuracy_class(
    compression: str,
    *,
    is_late: bool,
    state: str = "replicated",
    boundary_compression: str = "none",
) -> str:
    """Return in a few words how training differs from plain data parallelism.

    Args:
        compression: of the messages.
        is_late: whether some weights are read late.
        state: of the schedule.
        boundary_compression: of activations and their gradients.
    """
    words = []
    if is_late:
        words.append("late weights")
    if compression in SIXTEEN_BITS:
        words.append("16-bit messages")
    elif compression == "powersgd":
        words.append("low rank with error feedback")
    elif compression in MESSAGE_CODES:
        words.append(f"{_sent_numbers(compression)} with error feedback")
        if not sends_differences(state):
            words.append("weights rounded to 8 bits")
    if boundary_compression in SIXTEEN_BITS:
        words.append("activations in 16 bits")
    elif boundary_compression != "none":
        bits = BLOCK_CODES[boundary_compression].bits
        words.append(f"activations in {bits} bits")
    return ", ".join(words) or "exact"


def _sent_numbers(compression: str) -> str:
    """Return what a message of a code has of its numbers, in words."""
    code = MESSAGE_CODES[compression]
    if isinstance(code, LowRankCode):
        return f"rank {code.rank}"
    if code.keeps_all:
        return f"{code.bits} bits"
    return f"{code.n_kept} of {BLOCK} numbers"

"""Sums of gradients that are handed from rank to rank in 8 or 4 bits, with error feedback.

::

    v       = sum + e        e: what the sender's last message of the stage to this receiver lost
    message = Q(v)           see toolkit.runtime.quantization
    e       = v - Q(v)

The receiver adds Q(v) to its own sum, in the model's type. Statistics of norms, counts of the loss
and numbers that are not real travel as they are.

Source: error feedback as in arXiv 1901.09847, algorithm 2, here at each hop of a chain.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.runtime.compressed_form import CODES, CompressedMessage, separated
from toolkit.runtime.quantization import quantize_with_error
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Instruction


class CompressedSum(CompressedMessage):
    """A sum of gradients as it travels."""

    def decoded(self) -> dict[str, Tensor]:
        """Return the tensors of the sum, by name."""
        return self.form.split(self.numbers()) | self.exact


class SumCompressor:
    """Compresses the sums that one rank hands on, and keeps what they lost.

    Args:
        bits: of a number, 8 or 4.

    Attributes:
        errors: ``[stage][receiver]``, what the last message lost, ``[n]``.
        error_feedback: whether it is added to the next message.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.errors: dict[int, dict[int, Tensor]] = {}
        self.error_feedback = True

    @torch.no_grad()
    def compress(
        self, i: Instruction, total: GradientSum, weights: Collection[str]
    ) -> CompressedSum:
        """Return what instruction ``i`` sends.

        Args:
            i: the send. Those of a stage to a receiver are compressed in the order of the program.
            total: the sum.
            weights: names of the stage's trained weights.
        """
        form, exact = separated(total.tensors, weights, self.bits)
        if not form.tensors:
            # The layout has a place for codes all the same, of no bytes.
            content = torch.empty(0, dtype=torch.uint8)
            return CompressedSum(exact | {CODES: content}, form)
        numbers = form.flat(total.tensors)
        errors_of_stage = self.errors.setdefault(i.stage, {})
        receiver = i.peers[0]
        error = None
        if self.error_feedback:
            error = errors_of_stage.get(receiver)
        # The error has a place for each number: a weight that gets its first gradient later moves
        # them.
        if error is not None and error.shape != numbers.shape:
            raise UserError(
                f"compression: stage {i.stage} has {len(numbers)} gradients, and {len(error)}"
                " before; expected the same weights in each step. Use compression=none"
            )
        content, errors_of_stage[receiver] = quantize_with_error(
            numbers, error, self.bits
        )
        return CompressedSum(exact | {CODES: content}, form)

"""Sums of gradients that are handed from rank to rank as codes, with error feedback.

::

    v       = sum + e        e: what the sender's last message of the stage to this receiver lost
    message = Q(v)           see toolkit.runtime.quantization and toolkit.runtime.low_rank
    e       = v - Q(v)

The receiver adds Q(v) to its own sum, in the model's type. Statistics of norms, counts of the loss
and numbers that are not real travel as they are.

Source: error feedback as in arXiv 1901.09847, algorithm 2, here at each hop of a chain.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from toolkit.cost.compression import MessageCode
from toolkit.errors import UserError
from toolkit.runtime.compressed_form import CODES, CompressedMessage, separated
from toolkit.runtime.quantization import encode_with_error
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Instruction

Hop = tuple[int, int]
"""Stage and receiver."""

_BEFORE = -1  # step of what a state has from before


class CompressedSum(CompressedMessage):
    """A sum of gradients as it travels."""

    def decoded(self) -> dict[str, Tensor]:
        """Return the tensors of the sum, by name."""
        return self.form.split(self.numbers()) | self.exact


class Residual(NamedTuple):
    """What a message lost.

    Attributes:
        step: training step of the message.
        error: what it lost, ``[n]``.
    """

    step: int
    error: Tensor


class SumCompressor:
    """Compresses the sums that one rank hands on, and keeps what they lost.

    Args:
        code: of a message's numbers.

    Attributes:
        error_feedback: whether what a message lost is added to the next one.
        lead: the most training steps that this rank may be ahead of a rank that reads its state, as
            :meth:`RankCompressor.follow_loop` sets it. None: states are read only when all ranks
            have done the same number of steps.
    """

    def __init__(self, code: MessageCode) -> None:
        self.code = code
        self.error_feedback = True
        self.lead: int | None = None
        # What recent messages lost, the last one at the end. Tuples are replaced and never changed:
        # a thread that answers other ranks reads them while another one compresses.
        self._residuals: dict[Hop, tuple[Residual, ...]] = {}

    @property
    def errors(self) -> dict[int, dict[int, Tensor]]:
        """What the last messages lost, ``[stage][receiver]``, each ``[n]``."""
        return self.errors_after(None)

    def errors_after(self, steps_done: int | None) -> dict[int, dict[int, Tensor]]:
        """Return what the last messages of the first ``steps_done`` training steps lost.

        Args:
            steps_done: at most :attr:`lead` fewer than this rank has done; None: all so far.
        """
        errors: dict[int, dict[int, Tensor]] = {}
        # A copy: another thread may add a hop.
        for (stage, receiver), residuals in dict(self._residuals).items():
            for residual in residuals:
                if steps_done is None or residual.step < steps_done:
                    errors.setdefault(stage, {})[receiver] = residual.error
        return errors

    def load(self, errors: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Take over a copy of the :attr:`errors` of the same rank."""
        self._residuals = {}
        for stage, tensors in errors.items():
            for receiver, error in tensors.items():
                self._residuals[stage, receiver] = (Residual(_BEFORE, error.clone()),)

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
        form, exact = separated(total.tensors, weights, self.code)
        if not form.tensors:
            # The layout has a place for codes all the same, of no bytes.
            content = torch.empty(0, dtype=torch.uint8)
            return CompressedSum(exact | {CODES: content}, form)
        numbers = form.flat(total.tensors)
        hop = i.stage, i.peers[0]
        residuals = self._residuals.get(hop, ())
        error = None
        if self.error_feedback and residuals:
            error = residuals[-1].error
        # The error is one flat vector. A weight that gets its first gradient later shifts all
        # places behind it.
        if error is not None and error.shape != numbers.shape:
            raise UserError(
                f"compression: stage {i.stage} has {len(numbers)} gradients, and {len(error)}"
                " before; expected the same weights in each step. Use compression=none"
            )
        content, new_error = encode_with_error(
            numbers, error, form.encode, form.numbers
        )
        assert i.step is not None
        self._residuals[hop] = self._recent((*residuals, Residual(i.step, new_error)))
        return CompressedSum(exact | {CODES: content}, form)

    def _recent(self, residuals: tuple[Residual, ...]) -> tuple[Residual, ...]:
        """Return those of ``residuals`` that a state may still need."""
        if self.lead is None:
            return residuals[-1:]
        # The reader has done all steps before oldest_step. Its state needs the newest residual of
        # these, or a later one.
        oldest_step = residuals[-1].step - self.lead
        n_before_oldest = sum(residual.step < oldest_step for residual in residuals)
        return residuals[max(0, n_before_oldest - 1) :]

"""Sums of gradients that are handed from rank to rank in 8 or 4 bits, with error feedback.

::

    v       = sum + e        e: what the sender's last message of the stage to this receiver lost
    message = Q(v)           see toolkit.runtime.quantization
    e       = v - Q(v)

The receiver adds Q(v) to its own sum, in the model's type. Statistics of norms, counts of the loss
and numbers that are not real travel as they are.

Source: error feedback as in arXiv 1901.09847, algorithm 2, here at each hop of a chain.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from toolkit.cost.compression import quantized_bytes
from toolkit.errors import UserError
from toolkit.runtime.quantization import dequantize, quantize_with_error
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction, Schedule

CODES = "<codes>"  # no name of a weight
"""Place of the compressed gradients in a message."""

_COLLECTIVES = (Action.ALL_REDUCE, Action.REDUCE)


@dataclass(frozen=True)
class GradientForm:
    """Shape and type of a gradient.

    Attributes:
        name: of the weight.
        shape: its shape.
        dtype: type of the gradient at both ends.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class CompressedForm:
    """What the compressed part of a message stands for.

    Attributes:
        gradients: sorted by name.
        bits: of a number, 8 or 4.
    """

    gradients: tuple[GradientForm, ...]
    bits: int

    @classmethod
    def of(cls, gradients: Iterable[GradientForm], bits: int) -> "CompressedForm":
        """Return the form of ``gradients`` in any order."""
        # Both ends cut the numbers by this order, and neither sends it.
        return cls(tuple(sorted(gradients, key=lambda gradient: gradient.name)), bits)

    @property
    def sizes(self) -> list[int]:
        """Numbers of each gradient."""
        return [prod(gradient.shape) for gradient in self.gradients]

    @property
    def n_bytes(self) -> int:
        """Bytes of the codes and scales."""
        return quantized_bytes(sum(self.sizes), self.bits)

    @property
    def dtype(self) -> torch.dtype:
        """Type in which errors are kept: at least 32 bits."""
        dtypes = [gradient.dtype for gradient in self.gradients]
        return reduce(torch.promote_types, dtypes, torch.float32)

    def numbers(self, content: Tensor) -> Tensor:
        """Return the numbers of all gradients, ``[n]``, of a message's codes."""
        return dequantize(content, sum(self.sizes), self.bits, self.dtype)


@dataclass(frozen=True)
class CompressedSum:
    """A sum of gradients as it travels.

    Attributes:
        tensors: bytes at ``CODES``, and what travels as it is, by name.
        form: of the gradients in these bytes.
    """

    tensors: dict[str, Tensor]
    form: CompressedForm

    def decoded(self) -> dict[str, Tensor]:
        """Return the tensors of the sum, by name."""
        exact = {name: tensor for name, tensor in self.tensors.items() if name != CODES}
        pieces = self.form.numbers(self.tensors[CODES]).split(self.form.sizes)
        gradients = {}
        for gradient, piece in zip(self.form.gradients, pieces, strict=True):
            gradients[gradient.name] = piece.view(gradient.shape).to(gradient.dtype)
        return gradients | exact


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
        gradients = []
        exact = {}
        for name, tensor in total.tensors.items():
            if name in weights and tensor.is_floating_point():
                gradients.append(GradientForm(name, tuple(tensor.shape), tensor.dtype))
            else:
                exact[name] = tensor
        form = CompressedForm.of(gradients, self.bits)
        if not gradients:
            # The layout has a place for codes all the same, of no bytes.
            content = torch.empty(0, dtype=torch.uint8)
            return CompressedSum(exact | {CODES: content}, form)
        pieces = [total.tensors[gradient.name].flatten() for gradient in form.gradients]
        # One vector: blocks go across the ends of gradients, so small ones need no own scale.
        numbers = torch.cat([piece.to(form.dtype) for piece in pieces])
        errors_of_stage = self.errors.setdefault(i.stage, {})
        receiver = i.peers[0]
        error = None
        if self.error_feedback:
            error = errors_of_stage.get(receiver)
        if error is not None and error.shape != numbers.shape:
            raise UserError(
                f"compression: stage {i.stage} has {len(numbers)} gradients, and {len(error)}"
                " before; expected the same weights in each step. Use compression=none"
            )
        content, errors_of_stage[receiver] = quantize_with_error(numbers, error, self.bits)
        return CompressedSum(exact | {CODES: content}, form)


def ranks_state(compressors: Mapping[int, SumCompressor]) -> dict[str, Any]:
    """Return the entry of the compressors, by rank, in a state; nothing without compressors."""
    if not compressors:
        return {}
    ranks = {}
    for rank, compressor in compressors.items():
        errors = {stage: dict(tensors) for stage, tensors in compressor.errors.items()}
        ranks[rank] = {"errors": errors}
    return {"ranks": ranks}


def load_ranks_state(compressors: Mapping[int, SumCompressor], state: Mapping[str, Any]) -> None:
    """Take over the errors in ``state``, which :func:`check_ranks_state` accepts."""
    ranks = state.get("ranks", {})
    for rank, compressor in compressors.items():
        compressor.errors = {}
        for stage, tensors in ranks.get(rank, {}).get("errors", {}).items():
            copies = {receiver: error.clone() for receiver, error in tensors.items()}
            compressor.errors[stage] = copies


def check_ranks_state(state: Mapping[str, Any], sizes: Mapping[int, int], bits: int | None) -> None:
    """Raise UserError if what ranks keep in ``state`` is not what errors of messages are.

    Args:
        state: of all ranks.
        sizes: numbers of the weights of each stage.
        bits: of the runtime's messages; None: they are not compressed.
    """
    for rank, entries in state.get("ranks", {}).items():
        errors = entries.get("errors", {}) if isinstance(entries, dict) else None
        if errors and bits is None:
            raise UserError(
                f"the state has what compressed messages of rank {rank} lost: give the"
                " compression=int8 or int4 that saved it"
            )
        if bits is not None and (entries.keys() != {"errors"} or not _fits(errors, sizes)):
            raise UserError(
                f"the state of rank {rank} is not that of compressed messages of this model:"
                " give the runtime and options that saved it"
            )


def _fits(errors: Any, sizes: Mapping[int, int]) -> bool:
    """Whether errors are tensors, by stage and receiver, of no more numbers than weights."""
    for stage, tensors in errors.items():
        for error in tensors.values():
            if not (isinstance(error, Tensor) and error.ndim == 1):
                return False
            if len(error) > sizes.get(stage, 0):
                return False
    return True


def check_handed_on(schedule_plan: Schedule, bits: int) -> None:
    """Raise UserError unless all gradients that travel are handed from rank to rank.

    Args:
        schedule_plan: the schedule.
        bits: of a number.
    """
    if any(schedule_plan.changes(range(2**31))):
        raise UserError(
            f"compression=int{bits} takes one schedule, since a message adds what the one before"
            f" lost: got {schedule_plan.name} with changes; use compression=bf16"
        )
    actions = set()
    for instructions in schedule_plan.at(0).lower(2).ranks:
        actions |= {i.action for i in instructions if i.buffer == Buffer.GRADIENT}
    if Action.SEND not in actions or not actions.isdisjoint(_COLLECTIVES):
        raise UserError(
            f"compression=int{bits} is of gradients that are handed from rank to rank, as by"
            f" cdp_v1 and cdp_v2: {schedule_plan.name} sums them otherwise. Use compression=bf16,"
            f" or runtime=ddp with compression=int8"
        )

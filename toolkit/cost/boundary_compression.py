"""Bytes and time of activations, and of their gradients, that travel compressed between ranks."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

from toolkit.cost.compression import BLOCK_CODES, CODED_ITEM_BYTES, SIXTEEN_BITS
from toolkit.cost.stage_costs import Costs
from toolkit.errors import UserError, check_choice
from toolkit.model.kernel_work import Work
from toolkit.schedule import Schedule

BOUNDARY_COMPRESSIONS = ("none", "bf16", "int8", "int4")
"""Compressions of activations and their gradients between ranks.

None leaves numbers out: an activation is not sent again, so zeros in its place would stay zeros.
"""

Tensors = Sequence[tuple[int, int]]
"""Number of numbers of each tensor, and bytes of each number."""


def boundary_costs(costs: Costs, compression: str) -> Costs:
    """Return ``costs`` whose activations and their gradients travel compressed between ranks.

    Args:
        costs: one entry per stage. If their activations are unknown, each stage is taken to send
            one, of 32-bit numbers.
        compression: as ``boundary_compression`` of :class:`toolkit.runtime.Distributed`.

    Raises:
        UserError: the compression is unknown.
    """
    check_choice("boundary_compression", compression, BOUNDARY_COMPRESSIONS)
    if compression == "none":
        return costs
    compressed = []
    for cost in costs:
        outputs = _tensors_of(cost.output_activations, cost.output_bytes)
        # Gradients have the form of what they are gradients of.
        inputs = _tensors_of(cost.input_activations, cost.input_gradient_bytes)
        output_saving = _saved_bytes(outputs, compression)
        gradient_saving = _saved_bytes(inputs, compression)
        compressed_cost = replace(
            cost,
            forward_coding=_boundary_coding(outputs, inputs, compression),
            backward_coding=_boundary_coding(inputs, outputs, compression),
            compressed_output_bytes=cost.output_bytes - output_saving,
            compressed_input_gradient_bytes=cost.input_gradient_bytes - gradient_saving,
        )
        compressed.append(compressed_cost)
    return tuple(compressed)


def _tensors_of(activations: Tensors | None, n_bytes: float) -> Tensors:
    """Return the activations of a message; one, of 32-bit numbers, if they are unknown."""
    if activations is not None:
        return activations
    return [(round(n_bytes / CODED_ITEM_BYTES), CODED_ITEM_BYTES)]


def _saved_bytes(tensors: Tensors, compression: str) -> float:
    """Return the bytes that compression saves of a message of these activations."""
    saved_bytes = 0
    for n_numbers, item_bytes in tensors:
        if compression in SIXTEEN_BITS:
            # Numbers of 16 bits travel as they are.
            sent_bytes = n_numbers * min(2, item_bytes)
        else:
            # Blocks do not go across the ends of tensors.
            sent_bytes = BLOCK_CODES[compression].n_bytes(n_numbers)
        saved_bytes += n_numbers * item_bytes - sent_bytes
    return float(saved_bytes)


def _boundary_coding(sent: Tensors, received: Tensors, compression: str) -> Work | None:
    """Return the work of the codes of a forward or a backward; None: they take no time.

    Args:
        sent: activations, or their gradients, that the stage encodes.
        received: likewise, that it decodes.
        compression: of these messages.
    """
    if compression in SIXTEEN_BITS:
        return None
    code = BLOCK_CODES[compression]
    n_sent = sum(n_numbers for n_numbers, _ in sent)
    n_received = sum(n_numbers for n_numbers, _ in received)
    # How many numbers kernels read and write.
    n_passed = code.encode_passes * n_sent + code.decode_passes * n_received
    return Work(flops=0, bytes=round(CODED_ITEM_BYTES * n_passed))


def sends_activations(schedule: Schedule) -> bool:
    """Whether an activation goes from a rank to another, in any phase of a schedule."""
    for step in (0, *schedule.changes(range(sys.maxsize))):
        if schedule.at(step).layout.sends_activations:
            return True
    return False


def check_boundary_compression(
    compression: str, schedules: Iterable[Schedule], width: int = 1
) -> None:
    """Raise UserError if activations between ranks cannot travel so.

    Args:
        compression: of activations and their gradients.
        schedules: at least one has to send activations.
        width: devices of a rank.
    """
    check_choice("boundary_compression", compression, BOUNDARY_COMPRESSIONS)
    if compression == "none":
        return
    if width > 1:
        raise UserError(
            f"width={width} takes no boundary_compression={compression}: leave it out, or use"
            " width=1"
        )
    names = []
    for schedule in schedules:
        if sends_activations(schedule):
            return
        names.append(schedule.name)
    raise UserError(
        f"boundary_compression={compression} is of activations that go from rank to rank:"
        f" {', '.join(dict.fromkeys(names))} sends none. Use stages on several ranks, as"
        " one_f_one_b or schedule.placement=per_stage; compression= is of gradients and weights"
    )

"""Costs of each stage: arithmetic, seconds, activations, boundaries and parameters."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from toolkit.cost.hardware import Hardware
from toolkit.errors import UserError
from toolkit.model.checkpoints import check_checkpoint, recomputes
from toolkit.model.kernel_work import Work
from toolkit.schedule import Buffer


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage on one micro-batch. Bytes are those of the data types in use.

    Attributes:
        flops: floating-point operations of the forward, by torch's counter.
        backward_flops: floating-point operations of the backward.
        activation_bytes: saved for the backward, without parameters and stage inputs.
        input_bytes: tensors that the stage receives and keeps until its backward.
        output_bytes: tensors that the stage sends on.
        parameter_bytes: trainable parameters.
        statistics_bytes: statistics of batch norms, kept by each micro-batch, sent with gradients.
        extra_input_bytes: inputs that the previous stage does not keep already.
        integer_input_bytes: integer inputs, which have no gradient to send back.
        forward_seconds: measured seconds of the forward; None: use the hardware's roofline.
        backward_seconds: measured seconds of the backward; None if ``forward_seconds`` is.
        kernels: work of each operation's forward, in order.
        backward_kernels: work of each operation's backward, in forward order.
        weight_kernels: the part of each backward that makes gradients of weights.
        weight_share: share of the backward's seconds that gradients of weights take; None: by the
            roofline of ``weight_kernels``, or half if there are no kernels.
        forward_working_bytes: peak workspace of a forward besides what it keeps.
        backward_working_bytes: peak workspace of a backward, with the gradients it takes and makes.
        recomputes: whether a backward runs the forward again instead of keeping activations.
        compressed_gradient_bytes: a gradient sum and statistics in a message; None: as they are.
        compressed_weight_bytes: weights in a message; None: as they are.
        error_bytes: what a sender keeps of its last compressed sum to each receiver, or to all.
        exact_weight_bytes: exact weights of the owner, which it keeps in addition to the versions
            that it sends.
        weight_differences: whether messages of weights are differences to the version before, which
            receivers keep until then.
        input_activations: number of numbers, and bytes of each, of the activations that the stage
            receives; None: unknown. Other inputs are those of the model, integers, and what has no
            batch.
        output_activations: likewise of those that it sends on.
        compressed_output_bytes: what the stage sends on, in a message; None: as it is.
        compressed_input_gradient_bytes: gradients of its inputs, in a message; None: as they are.
        matrices: rows and columns of each trained parameter, as PowerSGD takes it; empty: unknown.
        forward_coding: work of codes of activations, which a forward takes longer.
        backward_coding: work of codes of their gradients, which a backward takes longer.
        coding: work of codes of gradients and weights in a training step of a worker, which its
            backwards take longer in equal shares.
        exchange_seconds: of the forward's collectives among the devices of a rank.
        backward_exchange_seconds: of the backward's.
        exchange_bytes: that a device sends to others of its rank, in a forward and a backward.
    """

    flops: float
    backward_flops: float
    activation_bytes: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    parameter_bytes: float = 0.0
    statistics_bytes: float = 0.0
    extra_input_bytes: float = 0.0
    integer_input_bytes: float = 0.0
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    kernels: tuple[Work, ...] = field(default=(), repr=False)
    backward_kernels: tuple[Work, ...] = field(default=(), repr=False)
    weight_kernels: tuple[Work, ...] = field(default=(), repr=False)
    weight_share: float | None = None
    forward_working_bytes: float = 0.0
    backward_working_bytes: float = 0.0
    recomputes: bool = False
    compressed_gradient_bytes: float | None = None
    compressed_weight_bytes: float | None = None
    error_bytes: float = 0.0
    exact_weight_bytes: float = 0.0
    weight_differences: bool = False
    input_activations: tuple[tuple[int, int], ...] | None = field(
        default=None, repr=False
    )
    output_activations: tuple[tuple[int, int], ...] | None = field(
        default=None, repr=False
    )
    compressed_output_bytes: float | None = None
    compressed_input_gradient_bytes: float | None = None
    matrices: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    forward_coding: Work | None = None
    backward_coding: Work | None = None
    coding: Work | None = None
    exchange_seconds: float = 0.0
    backward_exchange_seconds: float = 0.0
    exchange_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float | int) and not (isfinite(value) and value >= 0):
                raise UserError(
                    f"StageCost.{name} must be finite and at least 0: got {value}"
                )
        if self.weight_share is not None and self.weight_share > 1:
            raise UserError(
                f"StageCost.weight_share is a share, 0 to 1: got {self.weight_share}"
            )
        if (self.forward_seconds is None) != (self.backward_seconds is None):
            raise UserError(
                "give both forward_seconds and backward_seconds, or neither: got"
                f" {self.forward_seconds} and {self.backward_seconds}"
            )

    @property
    def kept_bytes(self) -> float:
        """Bytes that a micro-batch in flight keeps."""
        if self.recomputes:
            return self.statistics_bytes
        return self.statistics_bytes + self.activation_bytes

    @property
    def working_bytes(self) -> tuple[float, float]:
        """Workspace bytes of a forward and of a backward; both in the latter if it recomputes."""
        forward, backward = self.forward_working_bytes, self.backward_working_bytes
        return (0.0, max(forward, backward)) if self.recomputes else (forward, backward)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of a gradient sum and the statistics that travel with it."""
        return self.parameter_bytes + self.statistics_bytes

    @property
    def sent_gradient_bytes(self) -> float:
        """Bytes of a message of a gradient sum."""
        if self.compressed_gradient_bytes is None:
            return self.gradient_bytes
        return self.compressed_gradient_bytes

    @property
    def sent_weight_bytes(self) -> float:
        """Bytes of a message of weights."""
        if self.compressed_weight_bytes is None:
            return self.parameter_bytes
        return self.compressed_weight_bytes

    @property
    def input_gradient_bytes(self) -> float:
        """Bytes of the gradients that the backward makes for the previous stage."""
        return self.input_bytes - self.integer_input_bytes

    @property
    def sent_output_bytes(self) -> float:
        """Bytes of a message of what the stage sends on."""
        if self.compressed_output_bytes is None:
            return self.output_bytes
        return self.compressed_output_bytes

    @property
    def sent_input_gradient_bytes(self) -> float:
        """Bytes of a message of gradients of the stage's inputs."""
        if self.compressed_input_gradient_bytes is None:
            return self.input_gradient_bytes
        return self.compressed_input_gradient_bytes

    def update_bytes(self, optimizer_bytes: float | None = None) -> float:
        """Bytes an update reads (weights, gradient, state) and writes (weights, state).

        ``optimizer_bytes`` is the state; None is one momentum buffer.
        """
        state_bytes = (
            self.parameter_bytes if optimizer_bytes is None else optimizer_bytes
        )
        # Memory limits an update, not arithmetic: its seconds follow from these bytes alone.
        return 3 * self.parameter_bytes + 2 * state_bytes

    def seconds(self, hardware: Hardware, accumulate: int = 1) -> tuple[float, float]:
        """Return forward and backward seconds, with codes and collectives of a rank's devices.

        Args:
            hardware: that the stage runs on.
            accumulate: micro-batches of a worker in a training step.
        """
        forward, backward = self.compute_seconds(hardware)
        if self.forward_coding is not None:
            forward += hardware.roofline(self.forward_coding)
        if self.backward_coding is not None:
            backward += hardware.roofline(self.backward_coding)
        if self.coding is not None:
            backward += hardware.roofline(self.coding) / accumulate
        return (
            forward + self.exchange_seconds,
            backward + self.backward_exchange_seconds,
        )

    def compute_seconds(self, hardware: Hardware) -> tuple[float, float]:
        """Return forward and backward seconds of kernels: measured, else by the roofline."""
        if self.forward_seconds is not None and self.backward_seconds is not None:
            return self.forward_seconds, self.backward_seconds
        if not self.kernels and not self.backward_kernels:
            return self.flops / hardware.flops, self.backward_flops / hardware.flops
        forward_seconds = sum(map(hardware.roofline, self.kernels))
        backward_seconds = sum(map(hardware.roofline, self.backward_kernels))
        return forward_seconds, backward_seconds

    def weight_seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the backward that make gradients of weights."""
        _, backward = self.compute_seconds(hardware)
        if self.weight_share is not None:
            return self.weight_share * backward
        if not self.backward_kernels:
            # A linear layer's backward is two products of equal size, for its input and for its
            # weights.
            return backward / 2
        whole_seconds = sum(map(hardware.roofline, self.backward_kernels))
        weight_seconds = sum(map(hardware.roofline, self.weight_kernels))
        if not whole_seconds:
            return 0.0
        # Of a backward that is one kernel both parts read the same data: each takes at most all.
        return backward * min(1.0, weight_seconds / whole_seconds)

    def op_seconds(self, hardware: Hardware, accumulate: int = 1) -> list[float]:
        """Return the seconds of a forward, a backward, and its parts for inputs and weights.

        Args:
            hardware: that the stage runs on.
            accumulate: micro-batches of a worker in a training step.
        """
        forward, backward = self.seconds(hardware, accumulate)
        if self.recomputes:
            # The forward runs again first, and sends nothing. Its activations do not outlive the
            # op, so that the half for the weights is done at once, too.
            kernel_seconds, _ = self.compute_seconds(hardware)
            backward += kernel_seconds + self.exchange_seconds
            return [forward, backward, backward, 0.0]
        # The rest of the backward is the half that the stage before waits for.
        weights = self.weight_seconds(hardware)
        return [forward, backward, backward - weights, weights]


Costs = Sequence[StageCost]


def moved_bytes(costs: Costs) -> dict[Buffer | None, list[float]]:
    """Return the bytes of a message, ``[stage]``, by what it moves."""
    return {
        Buffer.ACTIVATION: [cost.sent_output_bytes for cost in costs],
        Buffer.ACTIVATION_GRADIENT: [cost.sent_input_gradient_bytes for cost in costs],
        Buffer.GRADIENT: [cost.sent_gradient_bytes for cost in costs],
        Buffer.WEIGHTS: [cost.sent_weight_bytes for cost in costs],
    }


def unit_costs(n_stages: int, backward: float = 1.0) -> tuple[StageCost, ...]:
    """Return equal costs with forwards of 1 s and buffers of 1 byte.

    Args:
        n_stages: number of stages.
        backward: seconds of a backward.
    """
    stage = StageCost(
        flops=1.0,
        backward_flops=backward,
        activation_bytes=1.0,
        input_bytes=1.0,
        output_bytes=1.0,
        parameter_bytes=1.0,
        forward_seconds=1.0,
        backward_seconds=backward,
    )
    return (stage,) * n_stages


def recomputing(costs: Costs, checkpoint: str | Sequence[int]) -> tuple[StageCost, ...]:
    """Return ``costs`` with some stages recomputing their forward.

    The next stage then keeps such a stage's output, as its input.

    Args:
        costs: one entry per stage.
        checkpoint: ``none``, ``all`` or a list of stages.

    Raises:
        UserError: ``checkpoint`` is something else.
    """
    check_checkpoint(checkpoint, len(costs))
    new_costs = []
    previous_recomputes = False
    for stage, cost in enumerate(costs):
        stage_recomputes = recomputes(checkpoint, stage)
        extra_input_bytes = cost.extra_input_bytes
        # It does not keep its output, which is this stage's input.
        if previous_recomputes:
            extra_input_bytes = cost.input_bytes
        new_costs.append(
            replace(
                cost, recomputes=stage_recomputes, extra_input_bytes=extra_input_bytes
            )
        )
        previous_recomputes = stage_recomputes
    return tuple(new_costs)

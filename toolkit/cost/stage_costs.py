"""Costs of each stage: arithmetic, seconds, activations, boundaries and parameters."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.cost.hardware import Hardware
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.checkpoints import check_checkpoint, recomputes
from toolkit.model.generators import kept_generators
from toolkit.model.kernel_work import Work, tensors_in
from toolkit.model.node_costs import differentiable, node_costs
from toolkit.model.partition import check_stages
from toolkit.model.peak_memory import working_bytes
from toolkit.model.precision import autocast, check_precision
from toolkit.model.structure import tensors_of
from toolkit.model.trace import refused
from toolkit.model.traced_stage import evaluated, in_training
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
        matrices: rows and columns of each trained parameter, as PowerSGD takes it; empty: unknown.
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
    matrices: tuple[tuple[int, int], ...] = field(default=(), repr=False)
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
        """Bytes that the backward sends to the previous stage."""
        return self.input_bytes - self.integer_input_bytes

    def update_bytes(self, optimizer_bytes: float | None = None) -> float:
        """Bytes an update reads (weights, gradient, state) and writes (weights, state).

        ``optimizer_bytes`` is the state; None is one momentum buffer.
        """
        state_bytes = (
            self.parameter_bytes if optimizer_bytes is None else optimizer_bytes
        )
        return 3 * self.parameter_bytes + 2 * state_bytes

    def seconds(self, hardware: Hardware) -> tuple[float, float]:
        """Return forward and backward seconds, with the collectives among devices of a rank."""
        forward, backward = self.compute_seconds(hardware)
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
        forward, backward = (
            map(hardware.roofline, kernels)
            for kernels in (self.kernels, self.backward_kernels)
        )
        return sum(forward), sum(backward)

    def weight_seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the backward that make gradients of weights."""
        _, backward = self.compute_seconds(hardware)
        if self.weight_share is not None:
            return self.weight_share * backward
        if not self.backward_kernels:
            return backward / 2
        whole_seconds = sum(map(hardware.roofline, self.backward_kernels))
        weight_seconds = sum(map(hardware.roofline, self.weight_kernels))
        # Of a backward that is one kernel both parts read the same data: each takes at most all.
        return (
            backward * min(1.0, weight_seconds / whole_seconds)
            if whole_seconds
            else 0.0
        )

    def op_seconds(self, hardware: Hardware) -> list[float]:
        """Return the seconds of a forward, a backward, and its parts for inputs and weights."""
        forward, backward = self.seconds(hardware)
        if self.recomputes:
            return [forward, forward + backward, forward + backward, 0.0]
        # The rest of the backward is the half that the stage before waits for.
        weights = self.weight_seconds(hardware)
        return [forward, backward, backward - weights, weights]


Costs = Sequence[StageCost]
Values = tuple[Tensor, ...]


def moved_bytes(costs: Costs) -> dict[Buffer | None, list[float]]:
    """Return the bytes of a message, ``[stage]``, by what it moves."""
    return {
        Buffer.ACTIVATION: [cost.output_bytes for cost in costs],
        Buffer.ACTIVATION_GRADIENT: [cost.input_gradient_bytes for cost in costs],
        Buffer.GRADIENT: [cost.sent_gradient_bytes for cost in costs],
        Buffer.WEIGHTS: [cost.sent_weight_bytes for cost in costs],
    }


def unit_costs(n_stages: int, backward: float = 1.0) -> tuple[StageCost, ...]:
    """Return equal costs with forwards of 1 s and buffers of 1 byte.

    Args:
        n_stages: number of stages.
        backward: seconds of a backward.
    """
    buffers = (1.0, 1.0, 1.0, 1.0)
    stage = StageCost(
        1.0, backward, *buffers, forward_seconds=1.0, backward_seconds=backward
    )
    return (stage,) * n_stages


def synchronized_time(device: torch.device) -> float:
    """Return ``time.perf_counter()`` in seconds after all work queued on ``device`` has ended."""
    if device.type == "cuda":
        # Kernels run asynchronously: wait before reading the clock.
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(
    run: Callable[[], Any], device: torch.device, precision: str
) -> tuple[float, float, Any]:
    """Return the seconds of ``run`` and of the backward of what it returns, and what it returns."""
    begin_time = synchronized_time(device)
    with autocast(precision, device):
        output = run()
    forward_end = backward_end = synchronized_time(device)
    # A stage may also send integers or tensors without a graph: nothing comes back for those.
    differentiable_outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn]
    if differentiable_outputs:
        torch.autograd.backward(
            differentiable_outputs,
            [torch.ones_like(tensor) for tensor in differentiable_outputs],
        )
        backward_end = synchronized_time(device)
    return forward_end - begin_time, backward_end - forward_end, output


def profile(
    stages: Stages,
    example: Any,
    repeats: int = 5,
    precision: str = "fp32",
) -> tuple[StageCost, ...]:
    """Return the costs of ``stages`` on a micro-batch like ``example``.

    Workspaces that libraries allocate inside an operation (cuDNN's convolutions, oneDNN's LSTM) are
    not counted: see :func:`toolkit.cost.library_workspace.add_library_workspace`. Generators keep
    their state.

    Args:
        stages: a partitioned model.
        example: a micro-batch, as for :func:`toolkit.model.partition`. On a real device seconds are
            measured; on the meta device nothing is computed or allocated, and the roofline gives
            the seconds.
        repeats: timed runs per stage; the median counts.
        precision: ``fp32`` or ``tf32``, or by autocast ``bf16`` or ``fp16``; autocast's copies of
            weights count as activations.

    Raises:
        UserError: ``stages`` is not a Stages, cannot train on the example, or unknown precision.
    """
    check_stages(stages)
    check_precision(precision)
    inputs = tensors_of(example)
    costs: list[StageCost] = []
    values, device, extra_bytes = inputs, inputs[0].device, 0
    # Work and bytes follow from shapes alone. Only seconds need values on the device.
    shapes = tuple(torch.empty_like(tensor, device="meta") for tensor in inputs)
    with refused(stages.model, inputs), kept_generators(inputs):
        for stage in stages:
            cost, outputs, extra_bytes_of_next = _analyse(
                stage, shapes, device, precision
            )
            cost, extra_bytes = (
                replace(cost, extra_input_bytes=extra_bytes),
                extra_bytes_of_next,
            )
            if device.type != "meta":
                timing = _measure(stage, values, repeats, precision)
                forward, backward, share, values = timing
                cost = replace(
                    cost,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    weight_share=share,
                )
            costs.append(cost)
            shapes = received_inputs(outputs)
    return tuple(costs)


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
    recomputing_stages = {
        stage for stage in range(len(costs)) if recomputes(checkpoint, stage)
    }
    return tuple(
        replace(
            cost,
            recomputes=stage in recomputing_stages,
            extra_input_bytes=cost.input_bytes
            if stage - 1 in recomputing_stages
            else cost.extra_input_bytes,
        )
        for stage, cost in enumerate(costs)
    )


def _analyse(
    stage: fx.GraphModule, inputs: Values, device: torch.device, precision: str
) -> tuple[StageCost, Values, int]:
    """Return a stage's cost without seconds, its outputs, and the bytes it sends unkept."""
    nodes = node_costs(stage, inputs, device, precision)
    output_nodes = next(iter(reversed(stage.graph.nodes))).args[0]
    outputs = tuple(nodes[node.name].output for node in output_nodes)
    forward_working_bytes, backward_working_bytes = working_bytes(
        stage, inputs, device, precision
    )
    unkept_outputs = [
        nodes[node.name].output for node in output_nodes if not nodes[node.name].kept
    ]
    working_nodes = [
        node for node in nodes.values() if node.forward.bytes or node.backward.bytes
    ]
    trained_modules = [
        module for name, module in stage.named_modules() if name not in evaluated(stage)
    ]
    running_means = [
        norm.running_mean for norm in trained_modules if isinstance(norm, _BatchNorm)
    ]
    trained_parameters = [each for each in stage.parameters() if each.requires_grad]
    cost = StageCost(
        flops=sum(node.forward.flops for node in working_nodes),
        backward_flops=sum(node.backward.flops for node in working_nodes),
        activation_bytes=sum(node.activations for node in nodes.values()),
        input_bytes=sum(tensor.nbytes for tensor in inputs),
        integer_input_bytes=sum(
            tensor.nbytes for tensor in inputs if not differentiable(tensor)
        ),
        output_bytes=sum(tensor.nbytes for tensor in outputs),
        parameter_bytes=sum(parameter.nbytes for parameter in trained_parameters),
        statistics_bytes=sum(
            2 * mean.nbytes for mean in running_means if mean is not None
        ),
        kernels=tuple(node.forward for node in working_nodes),
        backward_kernels=tuple(node.backward for node in working_nodes),
        weight_kernels=tuple(node.weight_backward for node in working_nodes),
        forward_working_bytes=forward_working_bytes,
        backward_working_bytes=backward_working_bytes,
        matrices=tuple(_as_matrix(parameter) for parameter in trained_parameters),
    )
    return cost, outputs, sum(tensor.nbytes for tensor in unkept_outputs)


def _as_matrix(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter, whose first dimension counts the rows."""
    n_rows = parameter.shape[0] if parameter.ndim else 1
    return n_rows, parameter.numel() // max(1, n_rows)


def _measure(
    stage: fx.GraphModule, inputs: Values, repeats: int, precision: str
) -> tuple[float, float, float | None, Values]:
    """Return median seconds of a forward and a backward, the weights' share, and the outputs.

    The share compares with a backward in which no weight needs a gradient. It is None if no input
    could have one either, as of token numbers.
    """
    stage_copy = in_training(copy.deepcopy(stage))  # a copy: running statistics change
    device = inputs[0].device
    seconds = []
    for _ in range(1 + repeats):
        run_inputs = (
            received_inputs(inputs)
            if any(value.requires_grad for value in inputs)
            else inputs
        )
        # Inputs of each run are leaves of their own, or a backward would reach into the run before.
        *run_seconds, outputs = timed(
            partial(stage_copy, *run_inputs), device, precision
        )
        seconds.append(run_seconds)
    forwards, backwards = zip(*seconds[1:], strict=True)  # the first run warms up
    forward, backward = median(forwards), median(backwards)
    share = None
    if any(differentiable(value) for value in inputs) and backward:
        stage_copy.requires_grad_(False)
        input_backwards = []
        for _ in range(1 + repeats):
            run = partial(stage_copy, *received_inputs(inputs))
            input_backwards.append(timed(run, device, precision)[1])
        # What is saved without gradients of weights is their share. Noise may make it negative.
        share = max(0.0, 1 - median(input_backwards[1:]) / backward)
    return forward, backward, share, received_inputs(outputs)


def received_inputs(values: Values) -> Values:
    """Return the tensors that a stage receives from one that computes ``values``."""
    return tuple(
        value.detach().requires_grad_(differentiable(value)) for value in values
    )

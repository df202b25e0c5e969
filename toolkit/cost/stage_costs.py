"""What each stage costs: arithmetic, time, activations, boundaries and parameters."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.cost.hardware import Hardware
from toolkit.errors import UserError
from toolkit.model import Stages
from toolkit.model.analysis import Work, differentiable, node_costs
from toolkit.model.partition import check_stages
from toolkit.model.precision import autocast, check_precision
from toolkit.model.recomputation import checkpointed
from toolkit.model.trace import evaluated, in_training, kept_generators, refused
from toolkit.model.workspace_memory import working_bytes


@dataclass(frozen=True)
class StageCost:
    """One stage on one micro-batch. Bytes are of the types that it computes with.

    Attributes:
        flops: floating-point operations of the forward, by torch's own counter.
        backward_flops: floating-point operations of the backward.
        activation_bytes: bytes that the forward keeps for the backward: shared storage once,
            neither parameters nor the stage's inputs.
        input_bytes: bytes of the tensors that the stage receives, and keeps until its backward.
        output_bytes: bytes of the tensors that the stage passes on.
        parameter_bytes: bytes of its trainable parameters.
        statistics_bytes: bytes of the running statistics of its batch norms, which every
            micro-batch in flight keeps and which travel with the gradients.
        extra_input_bytes: bytes of its inputs that the previous stage does not already keep; if
            both stages are on one rank, these are all the extra memory that the inputs cost.
        integer_input_bytes: bytes of its integer inputs, which have no gradient to send back.
        forward_seconds: measured seconds of the forward; None: the hardware's roofline tells them.
        backward_seconds: measured seconds of the backward; None as for the forward.
        kernels: work of each operation's forward, in order.
        backward_kernels: work of each operation's backward, in order of the forward.
        forward_working_bytes: the most that the forward needs while it runs, beside what it keeps.
        backward_working_bytes: likewise of the backward, the gradients that it is given and makes
            among it.
        recomputes: whether each backward computes the forward again, and the activations are only
            there meanwhile.
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
    forward_working_bytes: float = 0.0
    backward_working_bytes: float = 0.0
    recomputes: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float | int) and not (isfinite(value) and value >= 0):
                raise UserError(f"{name} of a stage is finite, 0 or more: got {value}")
        if (self.forward_seconds is None) != (self.backward_seconds is None):
            raise UserError(
                "forward_seconds and backward_seconds are told together, or neither: got"
                f" {self.forward_seconds} and {self.backward_seconds}"
            )

    @property
    def kept_bytes(self) -> float:
        """What a micro-batch in flight keeps."""
        return self.statistics_bytes + (0 if self.recomputes else self.activation_bytes)

    @property
    def working_bytes(self) -> tuple[float, float]:
        """What a forward and a backward need while they run, beside the activations.

        That of a forward which keeps none is not counted: the backward needs more.
        """
        if self.recomputes:
            return 0.0, max(self.forward_working_bytes, self.backward_working_bytes)
        return self.forward_working_bytes, self.backward_working_bytes

    @property
    def gradient_bytes(self) -> float:
        """A sum of gradients, and of statistics with it."""
        return self.parameter_bytes + self.statistics_bytes

    @property
    def input_gradient_bytes(self) -> float:
        """What its backward sends to the stage before."""
        return self.input_bytes - self.integer_input_bytes

    def update_bytes(self, optimizer_bytes: float | None = None) -> float:
        """What an update moves: weights, gradient and optimizer's state in, weights and state out.

        Args:
            optimizer_bytes: of the state; a momentum's unless given.
        """
        state = self.parameter_bytes if optimizer_bytes is None else optimizer_bytes
        return 3 * self.parameter_bytes + 2 * state

    def seconds(self, hardware: Hardware) -> tuple[float, float]:
        """Forward and backward: as measured, else by the roofline of ``hardware``."""
        if self.forward_seconds is not None and self.backward_seconds is not None:
            return self.forward_seconds, self.backward_seconds
        if not self.kernels and not self.backward_kernels:
            return self.flops / hardware.flops, self.backward_flops / hardware.flops
        return (
            sum(hardware.roofline(work) for work in self.kernels),
            sum(hardware.roofline(work) for work in self.backward_kernels),
        )


Costs = Sequence[StageCost]
Values = tuple[Tensor, ...]


def unit_costs(n_stages: int, backward: float = 1.0) -> tuple[StageCost, ...]:
    """Every forward one second, every backward ``backward``, every buffer one byte."""
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


def synchronized_time(device: torch.device) -> float:
    """Return ``time.perf_counter()`` in seconds after all work queued on ``device`` has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # kernels run asynchronously: wait before reading the clock
    return time.perf_counter()


def profile(
    stages: Stages,
    example: Tensor | tuple[Tensor, ...],
    repeats: int = 5,
    precision: str = "fp32",
) -> tuple[StageCost, ...]:
    """The costs of ``stages`` on a micro-batch like ``example``; random generators are kept.

    Activations are those of autograd; what a library keeps for itself, as oneDNN does of an LSTM
    on a CPU, is not among them.

    Args:
        stages: the model, partitioned.
        example: a micro-batch. On a real device, where the model is too, seconds are measured; on
            the meta device nothing is computed or allocated, and hardware tells the seconds.
        repeats: timed runs of each stage, of which the median counts.
        precision: ``fp32`` or ``tf32``, or by autocast ``bf16`` or ``fp16``; the copies of weights
            that autocast makes for the backward count as activations.

    Raises:
        ValueError: these are no stages, or they cannot train on the example; unknown precision.
    """
    check_stages(stages)
    check_precision(precision)
    inputs = example if isinstance(example, tuple) else (example,)
    with refused(stages.model, inputs), kept_generators(inputs):
        return _profile(stages, inputs, repeats, precision)


def recomputing(costs: Costs, checkpoint: str | Sequence[int]) -> tuple[StageCost, ...]:
    """``costs``, of which some stages compute their forward again instead of keeping activations.

    What such a stage passes on is kept by the next one, as its inputs.

    Args:
        costs: one entry a stage.
        checkpoint: ``none``, ``all`` or a list of stages.

    Raises:
        ValueError: it names something else.
    """
    chosen = checkpointed(checkpoint, len(costs))
    return tuple(
        replace(
            cost,
            recomputes=stage in chosen,
            extra_input_bytes=cost.input_bytes if stage - 1 in chosen else cost.extra_input_bytes,
        )
        for stage, cost in enumerate(costs)
    )


def _profile(stages: Stages, inputs: Values, repeats: int, precision: str) -> tuple[StageCost, ...]:
    costs: list[StageCost] = []
    values = inputs
    shapes = tuple(torch.empty_like(x, device="meta") for x in inputs)
    extra = 0
    for stage in stages:
        cost, outputs, extra_of_next = _analyse(stage, shapes, inputs[0].device, precision)
        cost, extra = replace(cost, extra_input_bytes=extra), extra_of_next
        if inputs[0].device.type != "meta":
            forward, backward, values = _measure(stage, values, repeats, precision)
            cost = replace(cost, forward_seconds=forward, backward_seconds=backward)
        costs.append(cost)
        shapes = _received(outputs)
    return tuple(costs)


def _analyse(
    stage: fx.GraphModule, inputs: Values, device: torch.device, precision: str
) -> tuple[StageCost, Values, int]:
    """The stage's cost on ``device`` without its seconds; what it passes on, and does not keep."""
    nodes = node_costs(stage, inputs, device, precision)
    output = next(iter(reversed(stage.graph.nodes))).args[0]
    outputs = tuple(nodes[node.name].output for node in output)
    in_forward, in_backward = working_bytes(stage, inputs, device, precision)
    unkept = [nodes[node.name].output for node in output if not nodes[node.name].kept]
    work = [node for node in nodes.values() if node.forward.bytes or node.backward.bytes]
    cost = StageCost(
        flops=sum(node.forward.flops for node in work),
        backward_flops=sum(node.backward.flops for node in work),
        activation_bytes=sum(node.activations for node in nodes.values()),
        input_bytes=sum(map(_bytes, inputs)),
        integer_input_bytes=sum(_bytes(x) for x in inputs if not differentiable(x)),
        output_bytes=sum(map(_bytes, outputs)),
        parameter_bytes=sum(_bytes(p) for p in stage.parameters() if p.requires_grad),
        statistics_bytes=sum(
            2 * _bytes(norm.running_mean)
            for name, norm in stage.named_modules()
            if isinstance(norm, _BatchNorm)
            and norm.running_mean is not None
            and name not in evaluated(stage)
        ),
        kernels=tuple(node.forward for node in work),
        backward_kernels=tuple(node.backward for node in work),
        forward_working_bytes=in_forward,
        backward_working_bytes=in_backward,
    )
    return cost, outputs, sum(map(_bytes, unkept))


def _measure(
    stage: fx.GraphModule, inputs: Values, repeats: int, precision: str
) -> tuple[float, float, Values]:
    """Median seconds of a forward and of a backward, and what the stage passes on."""
    twin = in_training(copy.deepcopy(stage))  # its batch norms may advance
    forwards, backwards = [], []
    for counted in [False] + [True] * repeats:
        received = _received(inputs) if any(x.requires_grad for x in inputs) else inputs
        begin = synchronized_time(received[0].device)
        with autocast(precision, received[0].device):
            outputs = twin(*received)
        middle = synchronized_time(received[0].device)
        trained = [x for x in outputs if x.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
        end = synchronized_time(received[0].device)
        if counted:
            forwards.append(middle - begin)
            backwards.append(end - middle)
    return median(forwards), median(backwards), _received(outputs)


def _received(values: Values) -> Values:
    return tuple(x.detach().requires_grad_(differentiable(x)) for x in values)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

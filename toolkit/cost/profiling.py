"""Costs of a model's stages: counted from shapes, and timed where the example is on a device."""

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.cost.stage_costs import StageCost
from toolkit.model import Stages
from toolkit.model.generators import kept_generators
from toolkit.model.kernel_work import tensors_in
from toolkit.model.node_costs import differentiable, node_costs
from toolkit.model.partition import check_stages
from toolkit.model.peak_memory import working_bytes
from toolkit.model.precision import autocast, check_precision
from toolkit.model.structure import tensors_of
from toolkit.model.trace import refused
from toolkit.model.traced_stage import evaluated, in_training

Values = tuple[Tensor, ...]


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
        # Ones stand for what the next stage would send: seconds do not depend on values.
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
    *,
    by_message: bool = False,
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
        by_message: whether stages receive their inputs by messages, which are contiguous. Otherwise
            inputs have the strides of what the stage before returns.

    Raises:
        UserError: ``stages`` is not a Stages, cannot train on the example, or unknown precision.
    """
    check_stages(stages)
    check_precision(precision)
    inputs = tensors_of(example)
    device = inputs[0].device
    costs: list[StageCost] = []
    values = inputs
    unkept_bytes = 0
    # Work and bytes follow from shapes alone. Only seconds need values on the device.
    shapes = tuple(torch.empty_like(tensor, device="meta") for tensor in inputs)
    with refused(stages.model, inputs), kept_generators(inputs):
        for stage in stages:
            # What the stage before sends but does not keep, this one has to keep as its input.
            extra_input_bytes = unkept_bytes
            cost, outputs, unkept_bytes = _analyse(stage, shapes, device, precision)
            cost = replace(cost, extra_input_bytes=extra_input_bytes)
            if device.type != "meta":
                forward, backward, share, values = _measure(
                    stage, values, repeats, precision
                )
                cost = replace(
                    cost,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    weight_share=share,
                )
            costs.append(cost)
            shapes = received_inputs(outputs, by_message=by_message)
    return tuple(costs)


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
    # An output that an op keeps for its backward is among the activations. The others have to be
    # kept by the next stage: on one rank, that is what they cost.
    unkept_outputs = [
        nodes[node.name].output for node in output_nodes if not nodes[node.name].kept
    ]
    working_nodes = [
        node for node in nodes.values() if node.forward.bytes or node.backward.bytes
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
        statistics_bytes=_statistics_bytes(stage),
        kernels=tuple(node.forward for node in working_nodes),
        backward_kernels=tuple(node.backward for node in working_nodes),
        weight_kernels=tuple(node.weight_backward for node in working_nodes),
        forward_working_bytes=forward_working_bytes,
        backward_working_bytes=backward_working_bytes,
        matrices=tuple(_as_matrix(parameter) for parameter in trained_parameters),
    )
    return cost, outputs, sum(tensor.nbytes for tensor in unkept_outputs)


def _statistics_bytes(stage: fx.GraphModule) -> int:
    """Return the bytes of the statistics that a stage's batch norms change."""
    evaluated_modules = evaluated(stage)
    n_bytes = 0
    for name, module in stage.named_modules():
        # A norm in evaluation keeps its statistics: there is nothing to send.
        if not isinstance(module, _BatchNorm) or name in evaluated_modules:
            continue
        if module.running_mean is not None:
            # A mean and a variance of each channel.
            n_bytes += 2 * module.running_mean.nbytes
    return n_bytes


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
        # Inputs of each run are leaves of their own, or a backward would reach into the run before.
        run_inputs = fresh_leaves(inputs)
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


def fresh_leaves(values: Values) -> Values:
    """Return inputs of a stage without gradients of an earlier run."""
    has_gradients = any(value.requires_grad for value in values)
    return received_inputs(values) if has_gradients else values


def received_inputs(values: Values, *, by_message: bool = False) -> Values:
    """Return the tensors that a stage receives from one that computes ``values``."""
    received = []
    for value in values:
        tensor = value.detach()
        if by_message:
            tensor = tensor.contiguous()
        received.append(tensor.requires_grad_(differentiable(value)))
    return tuple(received)

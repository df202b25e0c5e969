"""Costs of a model's stages: counted from shapes, and timed where the example is on a device."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.modules.batchnorm import _BatchNorm

from toolkit.cost.stage_costs import StageCost
from toolkit.cost.stage_seconds import (
    StageSeconds,
    Values,
    received_inputs,
    seconds_alone,
    seconds_in_turn,
)
from toolkit.model import Stages
from toolkit.model.generators import kept_generators
from toolkit.model.node_costs import differentiable, node_costs
from toolkit.model.partition import check_stages
from toolkit.model.peak_memory import working_bytes
from toolkit.model.precision import check_precision
from toolkit.model.structure import tensors_of
from toolkit.model.trace import refused
from toolkit.model.traced_stage import evaluated


def profile(
    stages: Stages,
    example: Any,
    repeats: int = 5,
    precision: str = "fp32",
    *,
    by_message: bool = False,
    in_turn: bool = False,
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
        in_turn: whether all stages are timed in turn, as they run in training; see
            :mod:`toolkit.cost.stage_seconds`. It takes the memory of all activations.

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
        for index, stage in enumerate(stages):
            # What the stage before sends but does not keep, this one has to keep as its input.
            extra_input_bytes = unkept_bytes
            cost, outputs, unkept_bytes = _analyse(stage, shapes, device, precision)
            cost = replace(
                cost,
                extra_input_bytes=extra_input_bytes,
                input_activations=_activations(stages, index, shapes),
                output_activations=_activations(stages, index + 1, outputs),
            )
            if device.type != "meta" and not in_turn:
                seconds, values = seconds_alone(stage, values, repeats, precision)
                cost = with_seconds(cost, seconds)
            costs.append(cost)
            shapes = received_inputs(outputs, by_message=by_message)
        if device.type != "meta" and in_turn:
            measured = seconds_in_turn([*stages], inputs, repeats, precision)
            costs = [*map(with_seconds, costs, measured)]
    return tuple(costs)


def _activations(
    stages: Stages, receiver: int, tensors: Values
) -> tuple[tuple[int, int], ...]:
    """Return numbers, and bytes of each, of the activations that cross to a stage.

    Args:
        stages: a partitioned model.
        receiver: the stage; behind the last one there are no activations.
        tensors: that cross.
    """
    if receiver == len(stages):
        return ()
    activations = [tensors[place] for place in sorted(stages.activations(receiver))]
    return tuple((tensor.numel(), tensor.element_size()) for tensor in activations)


def with_seconds(cost: StageCost, seconds: StageSeconds) -> StageCost:
    """Return ``cost`` with measured seconds."""
    return replace(
        cost,
        forward_seconds=seconds.forward,
        backward_seconds=seconds.backward,
        weight_share=seconds.weight_share,
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

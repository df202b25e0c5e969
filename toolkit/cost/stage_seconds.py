"""Seconds of a model's stages, measured on the device of the example.

A stage can be timed alone, over and over, or in turn with the others, as in a training step::

    alone     F0 B0  F0 B0  F0 B0  ...  F1 B1  F1 B1  F1 B1  ...  F2 B2  ...
    in turn   F0 F1 F2 B2 B1 B0    F0 F1 F2 B2 B1 B0   ...

Alone, caches still hold the stage's own weights and activations, and memory that a forward frees
is used by the next one: it takes less time than in training. In turn, the device must have memory
for the activations of all stages.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx

from toolkit.model.kernel_work import tensors_in
from toolkit.model.node_costs import differentiable
from toolkit.model.precision import autocast
from toolkit.model.traced_stage import in_training

Values = tuple[Tensor, ...]


@dataclass(frozen=True)
class StageSeconds:
    """Median seconds of a stage on a micro-batch.

    Attributes:
        forward: of a forward.
        backward: of a backward.
        weight_share: of the backward, what the gradients of weights take; None if no input could
            have a gradient, as of token numbers.
    """

    forward: float
    backward: float
    weight_share: float | None


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
    forward, output = timed_forward(run, device, precision)
    return forward, backward_seconds(output, device), output


def timed_forward(
    run: Callable[[], Any], device: torch.device, precision: str
) -> tuple[float, Any]:
    """Return the seconds of ``run``, and what it returns."""
    begin_time = synchronized_time(device)
    with autocast(precision, device):
        output = run()
    return synchronized_time(device) - begin_time, output


def backward_seconds(output: Any, device: torch.device) -> float:
    """Return the seconds of the backward of what a stage returned; 0 if nothing has a graph."""
    # A stage may also send integers or tensors without a graph: nothing comes back for those.
    differentiable_outputs = [tensor for tensor in tensors_in(output) if tensor.grad_fn]
    if not differentiable_outputs:
        return 0.0
    # Ones stand for what the next stage would send: seconds do not depend on values.
    gradients = [torch.ones_like(tensor) for tensor in differentiable_outputs]
    begin_time = synchronized_time(device)
    torch.autograd.backward(differentiable_outputs, gradients)
    return synchronized_time(device) - begin_time


def seconds_alone(
    stage: fx.GraphModule, inputs: Values, repeats: int, precision: str
) -> tuple[StageSeconds, Values]:
    """Return what a stage takes that runs alone, and its outputs.

    Args:
        stage: of a partitioned model; it keeps its running statistics and gradients.
        inputs: that it receives for a micro-batch.
        repeats: timed runs, after one that warms up; the median counts.
        precision: one of :data:`toolkit.model.precision.PRECISIONS`.
    """
    stage_copy = in_training(copy.deepcopy(stage))  # a copy: running statistics change
    device = inputs[0].device
    forwards, backwards = [], []
    for _ in range(1 + repeats):
        # Inputs of each run are leaves of their own, or a backward would reach into the run before.
        run = partial(stage_copy, *fresh_leaves(inputs))
        forward, backward, outputs = timed(run, device, precision)
        forwards.append(forward)
        backwards.append(backward)
    stage_copy.requires_grad_(False)
    input_backwards = []
    for _ in range(1 + repeats):
        run = partial(stage_copy, *received_inputs(inputs))
        input_backwards.append(timed(run, device, precision)[1])
    seconds = _median_seconds(forwards, backwards, input_backwards)
    return seconds, received_inputs(outputs)


def seconds_in_turn(
    stages: Sequence[fx.GraphModule], inputs: Values, repeats: int, precision: str
) -> list[StageSeconds]:
    """Return what each stage takes in a training step, in which all stages run in turn.

    Args:
        stages: all stages of a partitioned model; they keep their running statistics and gradients.
        inputs: of the model, a micro-batch.
        repeats: as of :func:`seconds_alone`.
        precision: as of :func:`seconds_alone`.
    """
    copies = [in_training(copy.deepcopy(stage)) for stage in stages]
    steps = []
    for _ in range(1 + repeats):
        steps.append(_step_seconds(copies, fresh_leaves(inputs), precision))
    for stage in copies:
        stage.requires_grad_(False)
    steps_of_inputs = []
    for _ in range(1 + repeats):
        run_inputs = received_inputs(inputs)
        steps_of_inputs.append(_step_seconds(copies, run_inputs, precision))
    seconds_of_stage = []
    for index in range(len(copies)):
        forwards = [step[index][0] for step in steps]
        backwards = [step[index][1] for step in steps]
        input_backwards = [step[index][1] for step in steps_of_inputs]
        seconds_of_stage.append(_median_seconds(forwards, backwards, input_backwards))
    return seconds_of_stage


def _step_seconds(
    stages: Sequence[fx.GraphModule], inputs: Values, precision: str
) -> list[tuple[float, float]]:
    """Run all forwards, then all backwards; return the seconds of both of each stage."""
    device = inputs[0].device
    forwards, outputs_of_stage = [], []
    for stage in stages:
        seconds, outputs = timed_forward(partial(stage, *inputs), device, precision)
        forwards.append(seconds)
        outputs_of_stage.append(outputs)
        inputs = received_inputs(outputs)
    backwards = []
    while outputs_of_stage:
        # A stage's activations are freed before the next backward, as in training.
        backwards.append(backward_seconds(outputs_of_stage.pop(), device))
    return list(zip(forwards, reversed(backwards), strict=True))


def _median_seconds(
    forwards: Sequence[float],
    backwards: Sequence[float],
    input_backwards: Sequence[float],
) -> StageSeconds:
    """Return the medians of all runs but the first, which warms up.

    Args:
        forwards: seconds, by run.
        backwards: seconds, by run.
        input_backwards: seconds of backwards of the inputs alone; 0 if none has a gradient.
    """
    backward = median(backwards[1:])
    input_backward = median(input_backwards[1:])
    weight_share = None
    if input_backward:
        # What is saved without gradients of weights is their share. Noise may make it negative.
        weight_share = max(0.0, 1 - input_backward / backward)
    return StageSeconds(median(forwards[1:]), backward, weight_share)


def fresh_leaves(values: Values) -> Values:
    """Return inputs of a stage without gradients of an earlier run."""
    has_gradients = any(value.requires_grad for value in values)
    return received_inputs(values) if has_gradients else values


def received_inputs(values: Values, *, by_message: bool = False) -> Values:
    """Return the tensors that a stage receives from one that computes ``values``.

    Args:
        values: that it computes.
        by_message: whether they come by a message, which is contiguous.
    """
    received = []
    for value in values:
        tensor = value.detach()
        if by_message:
            tensor = tensor.contiguous()
        received.append(tensor.requires_grad_(differentiable(value)))
    return tuple(received)

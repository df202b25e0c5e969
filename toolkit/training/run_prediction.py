"""What a run's measurements are compared with: the same steps as the simulator predicts them.

Costs are those of a device: where several share a rank, they follow from the plan by which the run
shares its stages.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from toolkit.cost import UNIT, Costs, Timeline, predict_calibrated, profile, recomputing
from toolkit.model import Stages, partition
from toolkit.model.input_spec import InputSpec
from toolkit.options import TrainingOptions
from toolkit.runtime.checked_optimizer import make_checked
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.meters.meter import optimizer_bytes_by_weight
from toolkit.schedule import Buffer, Schedule
from toolkit.schedule.traffic import traffic_of
from toolkit.training.devices import plan_of_width

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COUNT_BYTES = 8  # of a count of the loss in a message


def stages_and_costs(
    model: nn.Module,
    schedule: Schedule,
    form: InputSpec,
    options: TrainingOptions,
    *,
    width: int = 1,
    mesh: "DeviceMesh | None" = None,
) -> tuple[Stages, Costs]:
    """Return the stages of a run, and what they cost one device of a rank.

    Args:
        model: the model, on the CPU; its values do not matter.
        schedule: of the run.
        form: specification of the samples.
        options: options of the run.
        width: devices of a rank.
        mesh: as of :func:`toolkit.cost.tensor_width.profile_width`.

    Raises:
        UserError: the model runs but cannot be analysed.
    """
    # Cut by an example on the CPU, as for the run: one on the meta device counts the kernels of a
    # GPU, and may cut elsewhere.
    stages = partition(
        model,
        schedule.n_stages,
        form.example(options.batch),
        options.partition,
        check=False,
    )
    # What a rank receives is contiguous. A stage of attention that begins with a transposition then
    # has to copy it.
    by_message = not schedule.layout.has_whole_models
    example = form.example(options.batch, "meta")
    if width == 1:
        costs = profile(
            stages, example, precision=options.precision, by_message=by_message
        )
    else:
        # Only here: to import torch's DTensors takes a second.
        from toolkit.cost.tensor_width import Width, profile_width

        # Any machine will do: ops and messages get their measured seconds.
        costs = profile_width(
            stages,
            example,
            plan_of_width(stages.model, width, options.label_smoothing),
            Width(width, UNIT),
            options.precision,
            mesh,
            by_message=by_message,
        )
    return stages, recomputing(costs, options.checkpoint)


def beside_prediction(
    measured: Measurements, costs: Costs
) -> tuple[Timeline, Timeline]:
    """Return the measured timeline, and the simulated one of ops and messages that take as long.

    Args:
        measured: measurements of a run.
        costs: of its stages, by :func:`stages_and_costs`.
    """
    timeline = measured.timeline()
    return timeline, predict_calibrated(timeline, measured.schedule, costs)


def predict_bytes_sent(
    predicted: Timeline, schedule: Schedule, form: InputSpec
) -> list[float]:
    """Return the bytes that a device of each rank sends to other ranks, messages as they are.

    Args:
        predicted: timeline of a run from its first step on.
        schedule: of the run.
        form: specification of the samples.
    """
    sent_bytes = [*predicted.bytes_sent()]
    # The loss of tokens has a count, which travels with gradients: see
    # :func:`toolkit.training.evaluation.cross_entropy`.
    if len(form.output(1)) <= 2:
        return sent_bytes
    program = schedule.lower(len(predicted.step_ends))
    for rank, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if instruction.buffer in (Buffer.GRADIENT, Buffer.ACTIVATION_GRADIENT):
                units = traffic_of(instruction, rank).units
                sent_bytes[rank] += float(_COUNT_BYTES * units)
    return sent_bytes


def predict_optimizer_bytes(
    stages: Stages, costs: Costs, schedule: Schedule, make_optimizer: MakeOptimizer
) -> list[float]:
    """Return the bytes of the optimizer's state on a device of each rank, counters left out.

    Empty if it cannot be predicted: the optimizer does not run without values, or devices share a
    stage's weights and it keeps more numbers of some than of others.

    Args:
        stages: of the run, with whole weights.
        costs: of ``stages`` on a device.
        schedule: of the run.
        make_optimizer: function from a stage's parameters to its optimizer.
    """
    stage_bytes = []
    for stage, cost in zip(stages, costs, strict=True):
        n_bytes = _state_bytes(stage, cost.parameter_bytes, make_optimizer)
        if n_bytes is None:
            return []
        stage_bytes.append(n_bytes)
    program = schedule.final.lower(1)
    return [
        sum(stage_bytes[stage] for stage in program.updated(rank))
        for rank in range(schedule.n_ranks)
    ]


def _state_bytes(
    stage: nn.Module, device_bytes: float, make_optimizer: MakeOptimizer
) -> float | None:
    """Return the bytes of an optimizer's state for ``device_bytes`` of a stage's weights.

    None if it cannot be known.
    """
    weights = {
        name: nn.Parameter(torch.empty_like(parameter, device="meta"))
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    }
    try:
        optimizer, _ = make_checked(weights, make_optimizer, None)
        if optimizer is None:
            return 0.0
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        # A step on tensors without values: it makes the state, and computes nothing.
        optimizer.step()
    except (RuntimeError, NotImplementedError):  # a step that reads values
        return None
    state_bytes = optimizer_bytes_by_weight(optimizer)
    weight_bytes = [weight.nbytes for weight in weights.values()]
    if sum(weight_bytes) == device_bytes:
        return float(sum(state_bytes[weight] for weight in weights.values()))
    return _share_of_state(
        [state_bytes[weight] for weight in weights.values()], weight_bytes, device_bytes
    )


def _share_of_state(
    state_bytes: Sequence[int], weight_bytes: Sequence[int], device_bytes: float
) -> float | None:
    """Return the state of a device's share of weights; None unless all keep as many numbers."""
    words = {
        state / weight
        for state, weight in zip(state_bytes, weight_bytes, strict=True)
        if weight
    }
    if len(words) > 1:
        return None
    return device_bytes * words.pop()

"""A model whose stages sleep for the time that a device would compute, and what it costs.

Its parameters, gradients, updates and messages are real, so that many ranks train on few cores.
"""

import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from toolkit.cost import Costs, Hardware, StageCost, simulate
from toolkit.cost.timeline import COMPUTE
from toolkit.format import MB
from toolkit.model import Stages, partition
from toolkit.schedule import Schedule

FEATURES = 10  # of a sample, and classes
COLUMNS = (
    250  # of a stage's weight, a matrix, so that it has approximations of low rank
)
BACKWARD = 2.0  # time of a backward by that of a forward


class _Sleep(torch.autograd.Function):
    """The identity, whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        # Tracing and analysis run the stages, too, and need not wait.
        if not isinstance(x, FakeTensor) and x.device.type != "meta":
            time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if not isinstance(gradient, FakeTensor) and gradient.device.type != "meta":
            time.sleep(ctx.seconds)
        return gradient, None, None


def slept(x: Tensor, forward: float, backward: float) -> Tensor:
    """Return ``x`` after ``forward`` seconds; its backward takes ``backward`` seconds."""
    output: Tensor = _Sleep.apply(x, forward, backward)
    return output


fx.wrap("slept")  # one operation of a traced graph


class Sleeper(nn.Module):
    """Adds the mean of ``n_rows * COLUMNS`` parameters to its input, after a sleep.

    In the backward the sleep comes first: the gradient is there at its end.
    """

    def __init__(self, n_rows: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_rows, COLUMNS))
        self.seconds = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, FEATURES]`` to the same shape."""
        return slept(x + self.weight.mean(), *self.seconds)


def random_samples(n: int) -> tuple[Tensor, Tensor]:
    """Return inputs ``[n, FEATURES]`` and their classes, drawn by torch's generator."""
    return torch.randn(n, FEATURES), torch.randint(FEATURES, (n,))


def model(n_stages: int, megabytes: float, seconds: float) -> nn.Sequential:
    """Return equal stages of ``megabytes`` in all, which sleep ``seconds`` in a training step."""
    # A stage sleeps for a forward and a backward, BACKWARD times as long.
    forward = seconds / n_stages / (1 + BACKWARD)
    n_rows = _rows(n_stages, megabytes)
    return nn.Sequential(
        *(Sleeper(n_rows, forward, BACKWARD * forward) for _ in range(n_stages))
    )


def _rows(n_stages: int, megabytes: float) -> int:
    """Return the rows of a stage's weight."""
    # 4 bytes a number.
    return max(1, round(megabytes * MB / 4 / n_stages / COLUMNS))


def cut(sleeping_model: nn.Module, n_stages: int) -> Stages:
    """Cut a :func:`model` into its stages."""
    # Modules of a Sequential are called by their numbers: each but the first begins a stage.
    names = list(map(str, range(1, n_stages)))
    return partition(
        sleeping_model, n_stages, torch.zeros(1, FEATURES), by=names, check=False
    )


def stages(n_stages: int, megabytes: float, seconds: float) -> Stages:
    """Return the stages of a new :func:`model`."""
    return cut(model(n_stages, megabytes, seconds), n_stages)


def costs(stages: int, megabytes: float, seconds: float) -> tuple[StageCost, ...]:
    """Return the costs of a :func:`model` of a sample a micro-batch."""
    forward, n_bytes = seconds / stages / (1 + BACKWARD), 4.0 * FEATURES
    cost = StageCost(
        0.0,
        0.0,
        input_bytes=n_bytes,
        output_bytes=n_bytes,
        parameter_bytes=megabytes * MB / stages,
        forward_seconds=forward,
        backward_seconds=BACKWARD * forward,
        matrices=((_rows(stages, megabytes), COLUMNS),),
    )
    return (cost,) * stages


def merged(costs: Costs, together: int) -> Costs:
    """Return the costs of a cut in which every ``together`` stages are one."""
    groups = [costs[k : k + together] for k in range(0, len(costs), together)]
    return tuple(
        replace(
            group[0],
            parameter_bytes=sum(cost.parameter_bytes for cost in group),
            matrices=sum((cost.matrices for cost in group), ()),
            forward_seconds=sum(cost.forward_seconds or 0.0 for cost in group),
            backward_seconds=sum(cost.backward_seconds or 0.0 for cost in group),
        )
        for group in groups
    )


def predicted_times(
    schedule: Schedule, costs: Costs, hardware: Hardware, steps: int
) -> list[list[float]]:
    """Return of each rank when the simulator ends the last op of each of ``steps``."""
    # The very steps that are trained, from the first one on: what piles up in them counts.
    timeline = simulate(schedule.lower(steps).verify(), costs, hardware)
    ends = [[0.0] * steps for _ in range(timeline.n_ranks)]
    for span in timeline.spans:
        if span.lane == COMPUTE and span.step is not None:
            ends[span.rank][span.step] = max(ends[span.rank][span.step], span.end)
    return ends

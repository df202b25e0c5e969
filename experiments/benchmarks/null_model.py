"""The runtime's own time, measured on models that compute almost nothing.

Stages are timed apart from the runtime. In a training step each op, tensor, message and update
also takes time of the runtime: it swaps weights in, notes where it is, packs and sends. Steps of
null models, of a few numbers each, take little else::

    measured seconds of a step - simulated ones = ops a + tensors b + messages c + updates d

The null models differ in these counts, and least squares find a, b, c and d.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.training_steps import momentum_sgd
from toolkit.cost import Costs, Hardware, profile, simulate
from toolkit.model import Stages, partition
from toolkit.runtime import Distributed, World
from toolkit.runtime.microbatches import GlobalBatch
from toolkit.schedule import Program, Schedule, catalog
from toolkit.schedule.instruction import Action
from toolkit.schedule.steady_state import steps_to_time

_FEATURES = 4
_SAMPLES = 4  # of a micro-batch
_STEPS = 20  # that are timed
_LOWERED = 8  # steps of a program at least

StepSeconds = Callable[[World, Distributed, GlobalBatch, int], float]
"""Times a step of a runtime on a batch, over some steps."""


@dataclass(frozen=True)
class RuntimeOverhead:
    """Seconds that the runtime adds to those of the stages.

    Attributes:
        op: of a forward or a backward.
        tensor: of each weight or buffer of an op's stage.
        message: of a message that a rank sends or receives.
        update: of an update of a stage.
    """

    op: float
    tensor: float
    message: float
    update: float

    def of_an_op(self, program: Program, stages: Stages) -> float:
        """Return the seconds that an op of ``program`` takes longer, in the mean."""
        counts = count(program, stages)
        seconds = counts @ [self.op, self.tensor, self.message, self.update]
        return float(seconds / counts[0])

    def added_to(self, costs: Costs, program: Program, stages: Stages) -> Costs:
        """Return ``costs``, one entry per stage, with the runtime's time in their seconds."""
        more = self.of_an_op(program, stages)
        halves = any(i.action == Action.BACKWARD_WEIGHT for i in program.ranks[0])
        longer_costs = []
        for cost in costs:
            assert cost.forward_seconds is not None  # they are measured
            assert cost.backward_seconds is not None
            longer_cost = replace(
                cost,
                forward_seconds=cost.forward_seconds + more,
                backward_seconds=cost.backward_seconds + more * (2 if halves else 1),
            )
            longer_costs.append(longer_cost)
        return tuple(longer_costs)


def count(program: Program, stages: Stages) -> np.ndarray:
    """Return ops, their tensors, messages and updates: of a rank in a step, in the mean."""
    n_tensors = [len(stage.state_dict()) for stage in stages]
    counts = np.zeros(4)
    for order in program.ranks:
        for i in order:
            if i.action.computes:
                counts += [1, n_tensors[i.stage], 0, 0]
            elif i.action.communicates:
                counts[2] += 1
            elif i.action == Action.UPDATE:
                counts[3] += 1
    return counts / len(program.ranks) / program.n_steps


def null_models() -> Iterator[tuple[Schedule, int]]:
    """Yield schedules on two ranks, and layers of each stage."""
    for n_stages, accumulate, n_layers in (
        (1, 1, 1),
        (8, 1, 1),
        (8, 4, 1),
        (8, 1, 8),
        (2, 4, 8),
    ):
        yield (
            catalog.data_parallel(2, n_stages=n_stages, accumulate=accumulate),
            n_layers,
        )
        yield catalog.cyclic(2, 1, n_stages=n_stages, accumulate=accumulate), n_layers
    yield catalog.cyclic(2, n_stages=8, state="sharded"), 1
    yield catalog.data_parallel(2, n_stages=8, state="sharded"), 1


def layer() -> nn.Module:
    """Return what a network's layer has: weights, and a norm with running statistics."""
    return nn.Sequential(nn.Linear(_FEATURES, _FEATURES), nn.BatchNorm1d(_FEATURES))


def measure_overhead(
    world: World, hardware: Hardware, step_seconds: StepSeconds
) -> RuntimeOverhead:
    """Train the null models on the two ranks of ``world``, and return what their steps show.

    Args:
        world: joined ranks, which all call this.
        hardware: links and memory of the ranks, for the part that is simulated.
        step_seconds: times a step.
    """
    rows, seconds = [], []
    for schedule, n_layers in null_models():
        n_samples = _SAMPLES * schedule.n_microbatches
        batch = (
            torch.randn(n_samples, _FEATURES),
            torch.randint(_FEATURES, (n_samples,)),
        )
        model = nn.Sequential(*(layer() for _ in range(schedule.n_stages * n_layers)))
        example = batch[0][:_SAMPLES]
        stages = partition(model, schedule.n_stages, example, "parameters", check=False)
        costs = profile(stages, example)
        program = schedule.lower(steps_to_time(schedule, _LOWERED)).verify()
        weight_bytes = [cost.parameter_bytes for cost in costs]
        simulated = simulate(program, costs, hardware, weight_bytes).step_time
        runtime = Distributed(
            stages, schedule, momentum_sgd, F.cross_entropy, world=world
        )
        measured = step_seconds(world, runtime, batch, _STEPS)
        rows.append(count(program, stages))
        seconds.append(measured - max(world.gather(simulated)))
    return solve(np.array(rows), np.array(seconds))


def solve(counts: np.ndarray, seconds: np.ndarray) -> RuntimeOverhead:
    """Return the seconds of each thing counted that explain ``seconds`` best; none is negative.

    Args:
        counts: ``[null model][thing]``, as of :func:`count`.
        seconds: ``[null model]``.
    """
    n_things = counts.shape[1]
    things = list(range(n_things))
    seconds_of_thing = np.zeros(n_things)
    while things:
        # Relative errors count, or the largest null model would decide alone.
        weights = 1 / np.maximum(np.abs(seconds), 1e-6)
        shares, *_ = np.linalg.lstsq(
            counts[:, things] * weights[:, None], seconds * weights, rcond=None
        )
        if shares.min() >= 0:
            seconds_of_thing[things] = shares
            break
        # Noise, or a thing that goes with others: it counts as nothing.
        things.pop(int(shares.argmin()))
    return RuntimeOverhead(*map(float, seconds_of_thing))

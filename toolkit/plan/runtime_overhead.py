"""The runtime's own time, measured on models that compute almost nothing.

Stages are timed apart from the runtime. In a training step each op, tensor, message and update
also takes time of the runtime: it swaps weights in, notes where it is, packs and sends. Steps of
null models, of a few numbers each, take little else::

    measured seconds of a step - simulated ones =
        ops a + tensors b + messages c + bytes of messages d + updates e

The null models differ in these counts, and least squares find a to e. Bytes count, since the
processor of a rank computes its ops and also copies its messages.
"""

import time
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.cost import Costs, Hardware, profile, simulate
from toolkit.cost.profiling import with_seconds
from toolkit.cost.stage_costs import moved_bytes
from toolkit.cost.stage_seconds import StageSeconds, seconds_in_turn
from toolkit.model import Stages, partition
from toolkit.plan.measured_machine import measure_hardware
from toolkit.runtime import Distributed, World, join, launch
from toolkit.runtime.microbatches import GlobalBatch
from toolkit.schedule import Program, Schedule, catalog
from toolkit.schedule.instruction import Action
from toolkit.schedule.steady_state import steps_to_time

_FEATURES = 4
_SAMPLES = 4  # of a micro-batch
_WIDE = 1 << 16  # features that a stage sends: messages of 1 MB
_STEPS = 10  # that are timed in a round
_ROUNDS = 3  # in which all models are timed after one another; the median counts
_LOWERED = 8  # steps of a program at least
_REPEATS = 1  # runs of the stages in a round, after one that warms up
_OPTIMIZER = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


@dataclass(frozen=True)
class RuntimeOverhead:
    """Seconds that the runtime adds to those of the stages.

    Attributes:
        op: of a forward or a backward.
        tensor: of each weight or buffer of an op's stage.
        message: of a message that a rank sends or receives.
        byte: of each byte of these messages.
        update: of an update of a stage.
    """

    op: float
    tensor: float
    message: float
    byte: float
    update: float

    def of_an_op(self, program: Program, stages: Stages, costs: Costs) -> float:
        """Return the seconds that an op of ``program`` takes longer, in the mean."""
        counts = count(program, stages, costs)
        seconds = counts @ [self.op, self.tensor, self.message, self.byte, self.update]
        return float(seconds / counts[0])

    def added_to(self, costs: Costs, program: Program, stages: Stages) -> Costs:
        """Return ``costs``, one entry per stage, with the runtime's time in their seconds."""
        more = self.of_an_op(program, stages, costs)
        # A backward in two halves is two ops, and the runtime's time comes twice.
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


def count(program: Program, stages: Stages, costs: Costs) -> np.ndarray:
    """Return ops, their tensors, messages, their bytes, and updates: of a rank in a step."""
    n_tensors = [len(stage.state_dict()) for stage in stages]
    n_bytes = moved_bytes(costs)
    counts = np.zeros(5)
    for order in program.ranks:
        for i in order:
            if i.action.computes:
                counts += [1, n_tensors[i.stage], 0, 0, 0]
            elif i.action.communicates:
                counts += [0, 0, 1, n_bytes[i.buffer][i.stage], 0]
            elif i.action == Action.UPDATE:
                counts[4] += 1
    # The mean over ranks: costs are per stage, and cannot differ by rank.
    return counts / len(program.ranks) / program.n_steps


def layer() -> nn.Module:
    """Return what a network's layer has: weights, and a norm with running statistics."""
    return nn.Sequential(nn.Linear(_FEATURES, _FEATURES), nn.BatchNorm1d(_FEATURES))


def narrow(n_layers: int) -> nn.Module:
    """Return layers that compute and send almost nothing."""
    return nn.Sequential(*(layer() for _ in range(n_layers)))


def wide() -> nn.Module:
    """Return two layers between which large messages travel."""
    return nn.Sequential(nn.Linear(_FEATURES, _WIDE), nn.Linear(_WIDE, _FEATURES))


def null_models() -> Iterator[tuple[Schedule, nn.Module]]:
    """Yield schedules on two ranks, and models for them."""
    # Stages, micro-batches of a worker, and layers of a stage: chosen so that ops, tensors,
    # messages and updates do not grow in step, or least squares could not separate them.
    for n_stages, accumulate, n_layers in (
        (1, 1, 1),
        (8, 1, 1),
        (8, 4, 1),
        (8, 1, 8),
        (2, 4, 8),
    ):
        for schedule in (
            catalog.data_parallel(2, n_stages=n_stages, accumulate=accumulate),
            catalog.cyclic(2, 1, n_stages=n_stages, accumulate=accumulate),
        ):
            yield schedule, narrow(n_stages * n_layers)
    # Sharded states add messages of weights, and pipelines those of activations.
    yield catalog.cyclic(2, n_stages=8, state="sharded"), narrow(8)
    yield catalog.data_parallel(2, n_stages=8, state="sharded"), narrow(8)
    for n_microbatches in (4, 8):
        yield catalog.one_f_one_b(2, n_microbatches), narrow(2)
        # The same messages, but large: what their bytes cost shows in the difference.
        yield catalog.one_f_one_b(2, n_microbatches), wide()
        yield catalog.gpipe(2, n_microbatches), wide()


@dataclass
class _NullTraining:
    """A null model and its runtime.

    Attributes:
        program: steps that are simulated.
        stages: with weights of their own, to be timed apart.
        costs: one entry per stage; their seconds do not count.
        runtime: trains the model.
        batch: of a training step.
        seconds: measured seconds of a step without the simulated ones, by round.
    """

    program: Program
    stages: Stages
    costs: Costs
    runtime: Distributed
    batch: tuple[Tensor, Tensor]
    seconds: list[float] = field(default_factory=list)


def _null_training(world: World, schedule: Schedule, model: nn.Module) -> _NullTraining:
    n_samples = _SAMPLES * schedule.n_microbatches
    batch = torch.randn(n_samples, _FEATURES), torch.randint(_FEATURES, (n_samples,))
    example = batch[0][:_SAMPLES]
    stages = partition(model, schedule.n_stages, example, "parameters", check=False)
    program = schedule.lower(steps_to_time(schedule, _LOWERED)).verify()
    timed_stages = deepcopy(stages)  # the runtime takes the weights of the others
    costs = profile(stages, example, repeats=1)
    runtime = Distributed(stages, schedule, _OPTIMIZER, F.cross_entropy, world=world)
    return _NullTraining(program, timed_stages, costs, runtime, batch)


def measured_costs(
    world: World, stages: Stages, costs: Costs, example: Tensor
) -> Costs:
    """Return ``costs`` with seconds: the means of the ranks, which time all stages at once."""
    world.barrier()
    measured = seconds_in_turn([*stages], (example,), _REPEATS, "fp32")
    seconds_of_rank = world.gather(measured)
    mean_costs = []
    for cost, seconds in zip(costs, zip(*seconds_of_rank, strict=True), strict=True):
        forward = sum(each.forward for each in seconds) / world.size
        backward = sum(each.backward for each in seconds) / world.size
        share = seconds[world.rank].weight_share
        mean_costs.append(with_seconds(cost, StageSeconds(forward, backward, share)))
    return mean_costs


def runtime_overhead() -> RuntimeOverhead:
    """Return what two new processes of this machine measure on their CPUs, in half a minute or so.

    Raises:
        JobFailedError: a process could not be started, or died.
    """
    return launch(_measured_by_rank, 2)[0]


def _measured_by_rank() -> RuntimeOverhead:
    world = join(device="cpu")
    return measure_overhead(world, measure_hardware(world))


def measure_overhead(world: World, hardware: Hardware) -> RuntimeOverhead:
    """Train the null models on the two ranks of ``world``, and return what their steps show.

    Args:
        world: joined ranks, which all call this.
        hardware: links and memory of the ranks, for the part that is simulated.
    """
    trainings = [_null_training(world, *null_model) for null_model in null_models()]
    for _ in range(_ROUNDS):
        for each in trainings:
            example = each.batch[0][:_SAMPLES]
            costs = measured_costs(world, each.stages, each.costs, example)
            weight_bytes = [cost.parameter_bytes for cost in costs]
            simulated = simulate(each.program, costs, hardware, weight_bytes).step_time
            measured = step_seconds(world, each.runtime, each.batch, _STEPS)
            # The slower rank counts on both sides: a measured step is that of the slowest, too.
            each.seconds.append(measured - max(world.gather(simulated)))
    counts = [count(each.program, each.stages, each.costs) for each in trainings]
    # Of the differences and not of each side: costs and steps of one round met the same load.
    seconds = [median(each.seconds) for each in trainings]
    return solve(np.array(counts), np.array(seconds))


def step_seconds(
    world: World, runtime: Distributed, batch: GlobalBatch, n_steps: int
) -> float:
    """Return the seconds of a training step on the slowest rank, over ``n_steps`` or more."""
    world.barrier()
    # Steps at both ends overlap with steps that are not timed.
    n_overlapping = 1 + runtime.schedule.max_staleness
    n_steps = max(n_steps, 2 * n_overlapping + 1)
    moments = [time.perf_counter()]
    moments += [time.perf_counter() for _ in runtime.run([batch] * n_steps)]
    seconds = moments[-1 - n_overlapping] - moments[n_overlapping]
    return max(world.gather(seconds / (n_steps - 2 * n_overlapping)))


def solve(counts: np.ndarray, seconds: np.ndarray) -> RuntimeOverhead:
    """Return what each thing counted takes that explains ``seconds`` best; none is negative.

    Args:
        counts: ``[null model][thing]``, as of :func:`count`.
        seconds: ``[null model]``.
    """
    n_things = counts.shape[1]
    scales = np.maximum(counts.max(axis=0), 1e-9)  # bytes are millions, updates are few
    counts = counts / scales
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
    return RuntimeOverhead(*map(float, seconds_of_thing / scales))

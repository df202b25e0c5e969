"""The base class of the baselines."""

from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.checks import checked_world, scalar
from toolkit.runtime.grouped import Loss
from toolkit.runtime.microbatches import BatchReader, StepResult, take
from toolkit.runtime.process_group.group import World
from toolkit.runtime.stage import Values
from toolkit.runtime.state import part_of
from toolkit.runtime.updater import MakeOptimizer, Weights
from toolkit.schedule import RandomDelay, Schedule


class Baseline(Runtime):
    """A runtime of torch's own, under this toolkit's interface.

    Every rank starts with the weights of rank 0.

    Args:
        stages: the model, partitioned; on the device of ``world``.
        schedule: a schedule with as many stages, of a kind that the baseline can run.
        optimizer: function from the list of a stage's parameters to its optimizer.
        loss: mean loss of a micro-batch, from outputs and targets.
        world: the ranks; those of this job unless given.

    Raises:
        UserError: stages, schedule and ranks do not fit.
    """

    world: World

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        world: World | None,
    ) -> None:
        super().__init__(stages, schedule, optimizer)
        self.world = checked_world(world, stages, schedule)
        self._loss = scalar(loss)
        self._everyone = range(self.world.size)
        self._begin_alike()

    def _part_of(self, stages: Collection[int]) -> dict[str, Any]:
        """Return a rank's part of the state: that of ``stages``."""
        return part_of(
            self.steps_done,
            self.stages,
            self._updaters,
            {j: self._versions(j) for j in stages},
            stages,
            leads=self.rank == 0,
        )

    def _versions(self, j: int) -> dict[int, Weights]:
        """Return the weight versions of stage ``j`` that are still read."""
        return {self.steps_done: self._updaters[j].newest()}

    def _reads(self, step: int) -> Sequence[int]:
        return [self.rank]

    @abstractmethod
    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        """Run training step ``step`` on this rank's part of its batch.

        Every wait for other ranks is within ``world.watch.waiting``.
        """

    def _steps(self, source: BatchReader, n_steps: int | None) -> Steps:
        for share in take(source, n_steps):
            assert share is not None  # every rank reads something
            step = self.steps_done
            self.world.watch.at(f"step {step}", step)
            result = self._train(step, *share)
            self.steps_done += 1
            yield result

    def _result(self, step: int, outputs: Tensor, loss: Tensor) -> StepResult:
        return StepResult(step, (self.rank,), loss.detach()[None], outputs.detach())

    def _begin_alike(self) -> None:
        model = self.stages.model
        with self.world.watch.waiting("the first weights of rank 0", [0]):
            for tensor in chain(model.parameters(), model.buffers()):
                dist.broadcast(tensor.data, 0, self.world.group)


class Released:
    """Parameters of other ranks, whose memory is freed during training."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.shapes = {parameter: parameter.shape for parameter in parameters}

    def release(self) -> None:
        for parameter in self.shapes:
            if parameter.numel():
                parameter.data = parameter.data.new_empty(0)

    def restore(self) -> None:
        """Allocate their memory; its content is undefined."""
        for parameter, shape in self.shapes.items():
            if parameter.shape != shape:
                parameter.data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)


def is_data_parallel(schedule: Schedule, staleness: int, states: Sequence[str]) -> bool:
    """Return whether rank m runs micro-batch m, and all weights are ``staleness`` steps late."""
    return (
        schedule.state in states
        and schedule.n_ranks == schedule.n_microbatches
        and not isinstance(schedule.delay, RandomDelay)
        and not (schedule.predict and staleness)
        and all(late == staleness for stage in schedule.staleness for late in stage)
        and all(
            schedule.rank(j, m, step) == m
            for j in range(schedule.n_stages)
            for m in range(schedule.n_microbatches)
            for step in range(schedule.layout.turns(j))
        )
    )


def describe(schedule: Schedule) -> str:
    """Return the schedule's description for an error."""
    placement = schedule.placement if isinstance(schedule.placement, str) else schedule.layout.name
    return (
        f"{schedule.name}, {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches,"
        f" placement={placement}, state={schedule.state}"
    )

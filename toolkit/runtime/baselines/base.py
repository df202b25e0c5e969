"""What the baselines have in common."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.checks import check_fit, checked_world, divisible, moved, scalar, take
from toolkit.runtime.grouped import Loss
from toolkit.runtime.interface import Batch, Divisible
from toolkit.runtime.processes.world import World
from toolkit.runtime.result import StepResult
from toolkit.runtime.stage import Values
from toolkit.runtime.state import check_state, joined, part_of
from toolkit.runtime.tree import map_tensors
from toolkit.runtime.updater import MakeOptimizer, Updater, Weights
from toolkit.schedule import RandomDelay, Schedule


class Baseline(ABC):
    """A :class:`toolkit.runtime.interface.Runtime` on torch's own means.

    Every rank begins with the weights of rank 0.

    Args:
        stages: the model, partitioned; on the device of ``world``.
        schedule: for as many stages, of a kind that the baseline can run.
        optimizer: makes the optimizer of a stage from the list of its parameters.
        loss: mean loss of a micro-batch, from outputs and targets.
        world: the ranks; those of this job unless given.

    Raises:
        ValueError: stages, schedule and ranks do not fit.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        world: World | None,
    ) -> None:
        check_fit(stages, schedule, optimizer)
        self.stages = stages
        self.schedule = schedule
        self.world = checked_world(world, stages, schedule)
        self.steps_done = 0
        self._loss = scalar(loss)
        self._updaters: Sequence[Updater] = ()
        self._everyone = range(self.world.size)
        self._begin_alike()

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def n_ranks(self) -> int:
        return self.world.size

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        rates = (updater.learning_rate for updater in self._updaters)
        return [rate for rate in rates if rate is not None]

    @abstractmethod
    def module(self) -> nn.Module:
        """The whole model with the newest weights, on every rank. Every rank calls it."""

    @property
    def own(self) -> Collection[int]:
        """The stages that this rank updates: all."""
        return range(len(self.stages))

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """What this rank alone adds to :meth:`state_dict`. Every rank calls it.

        Tensors of which each rank has a share are DTensors.
        """

    def _part(self, stages: Collection[int]) -> dict[str, Any]:
        """The part of a rank that stands for ``stages``."""
        return part_of(
            self.steps_done,
            self.stages,
            self._updaters,
            {j: self._versions(j) for j in stages},
            stages,
            leads=self.rank == 0,
        )

    def _versions(self, j: int) -> dict[int, Weights]:
        """The weights of stage ``j`` that are still read."""
        return {self.steps_done: self._updaters[j].newest()}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, but for the data; on every rank.

        Every rank calls it. The other runtimes can go on from it, and the other way round.
        """
        return joined(self.world.gather(map_tensors(Tensor.cpu, self.part())))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, by whichever runtime. Every rank calls it.

        Raises:
            ValueError: the state is of other stages, lacks weights that the schedule reads, or is
                formed otherwise than this runtime's.
        """
        form = self.module().state_dict()
        self.world.agree(lambda: check_state(state, self.schedule, self._updaters, form, self.own))
        self._load(state)
        self.steps_done = state["steps_done"]

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that has been checked."""

    def averages(self) -> Weights:
        """The average of each trained parameter, by its name: here none is kept."""
        return {}

    @property
    def _reads(self) -> Sequence[int]:
        """The micro-batches that this rank reads: its own, or all."""
        return [self.rank]

    @abstractmethod
    def _train(self, step: int, inputs: Values, targets: Tensor) -> StepResult:
        """Training step ``step``, on what this rank reads of its batch."""

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values``, on each of them. Every rank calls it."""
        return self.world.total(values)

    def step(self, inputs: Tensor | Values, targets: Tensor) -> StepResult:
        """One training step, to its last update.

        Args:
            inputs: ``[n_microbatches * b, ...]``, or a tuple of such tensors; micro-batch m is
                slice m.
            targets: ``[n_microbatches * b, ...]``.

        Raises:
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        (result,) = self.run([(inputs, targets)])
        return result

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each global batch; yield each step's result, of this rank's micro-batches.

        Exhaust it: only then are all updates in.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`, the same on every rank. Of batches
                that are :class:`~toolkit.runtime.interface.Divisible` a rank loads only what it
                reads.
            n_steps: how many of them to take; all unless given.

        Raises:
            ValueError: a batch cannot be divided, or there are fewer than n_steps.
        """
        for inputs, targets in take(self._shares(batches), n_steps):
            step = self.steps_done
            self.world.watch.at(f"step {step}", step, self._everyone)
            result = self._train(step, inputs, targets)
            self.steps_done += 1
            yield result

    def _shares(self, batches: Iterable[Batch]) -> Iterator[tuple[Values, Tensor]]:
        """Of each batch what this rank reads, on its device."""
        n, reads, device = self.schedule.n_microbatches, self._reads, self.world.device
        if isinstance(batches, Divisible):
            batches, n = batches.parts(n, lambda k: reads), len(reads)
        for batch in batches:
            inputs, targets = divisible(*batch, n)
            if n > len(reads):
                (mine,) = reads
                inputs = tuple(tensor.chunk(n)[mine] for tensor in inputs)
                targets = targets.chunk(n)[mine]
            yield moved(inputs, targets, device)

    def _result(self, step: int, outputs: Tensor, loss: Tensor) -> StepResult:
        return StepResult(step, (self.rank,), loss.detach()[None], outputs.detach())

    def _begin_alike(self) -> None:
        model = self.stages.model
        with self.world.watch.waiting("the first weights of rank 0", [0]):
            for tensor in chain(model.parameters(), model.buffers()):
                dist.broadcast(tensor.data, 0, self.world.group)


def is_data_parallel(schedule: Schedule, staleness: int, states: Sequence[str]) -> bool:
    """Whether rank m runs micro-batch m, and all weights are read ``staleness`` steps late."""
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


def called(schedule: Schedule) -> str:
    """The schedule, as an error names it."""
    placement = schedule.placement if isinstance(schedule.placement, str) else schedule.layout.name
    return (
        f"{schedule.name}, {schedule.n_stages} stages, {schedule.n_microbatches} micro-batches,"
        f" placement={placement}, state={schedule.state}"
    )

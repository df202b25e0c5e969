"""What the training loop asks of a runtime, whichever it is."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.checks import check_fit
from toolkit.runtime.processes.world import World
from toolkit.runtime.result import StepResult
from toolkit.runtime.source import Batch, Source
from toolkit.runtime.stage import Values
from toolkit.runtime.state import check_state, form_of, joined
from toolkit.runtime.tree import map_tensors
from toolkit.runtime.updater import MakeOptimizer, Updater, Weights, join_averages
from toolkit.schedule import Schedule


class Runtime(ABC):
    """Trains a model on global batches, as one of ``n_ranks`` processes that all call it alike.

    Args:
        stages: the model, partitioned.
        schedule: for as many stages.
        optimizer: makes the optimizer of a stage from the list of its parameters.

    Attributes:
        world: the processes that train together; None where there is one.
        steps_done: training steps until now.

    Raises:
        ValueError: stages, schedule and optimizer do not fit.
    """

    world: World | None = None

    def __init__(self, stages: Stages, schedule: Schedule, optimizer: MakeOptimizer) -> None:
        check_fit(stages, schedule, optimizer)
        self.stages = stages
        self.schedule = schedule
        self.steps_done = 0
        self._form = form_of(stages)
        self._updaters: Sequence[Updater] = ()  # of each stage
        devices = {parameter.device for parameter in stages.model.parameters()}
        self._device = devices.pop() if len(devices) == 1 else None

    @property
    def rank(self) -> int:
        return 0 if self.world is None else self.world.rank

    @property
    def n_ranks(self) -> int:
        return 1 if self.world is None else self.world.size

    @property
    def own(self) -> Collection[int]:
        """The stages whose updates this rank makes: all, unless it says otherwise."""
        return range(len(self.stages))

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        rates = (updater.learning_rate for updater in self._updaters)
        return [rate for rate in rates if rate is not None]

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values``, on each of them. Every rank calls it."""
        return values if self.world is None else self.world.total(values)

    def step(self, inputs: Tensor | Values, targets: Tensor) -> StepResult:
        """One training step, to its last update.

        Args:
            inputs: ``[n_microbatches * b, ...]``, or a tuple of such tensors, the same on every
                rank and on any device; micro-batch m is slice m.
            targets: ``[n_microbatches * b, ...]``.

        Returns:
            the results of this rank's micro-batches.

        Raises:
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        (result,) = self.run([(inputs, targets)])
        return result

    @abstractmethod
    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each global batch; yield each step's result, of this rank's micro-batches.

        Exhaust it, on every rank: only then are all updates in.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`. Of batches that are
                :class:`~toolkit.runtime.source.Divisible` a rank loads only what it reads.
            n_steps: how many of them to take; all unless given.

        Raises:
            ValueError: a batch cannot be divided, or there are fewer than n_steps.
        """

    def _reads(self, step: int) -> Sequence[int]:
        """The micro-batches that this rank reads at ``step``, ascending: all, unless it says."""
        return range(self.schedule.n_microbatches)

    def _source(self, batches: Iterable[Batch]) -> Source:
        """What this rank reads of ``batches``, the first of which is of the next step."""
        n = self.schedule.n_microbatches
        return Source(batches, n, self._reads, self.steps_done, self._device)

    @abstractmethod
    def module(self) -> nn.Module:
        """The whole model with the newest weights, on every rank. Every rank calls it."""

    def averages(self) -> Weights:
        """The average of each trained parameter, by its name; empty if none is kept.

        On every rank; every rank calls it.
        """
        return join_averages(self._updaters)

    @abstractmethod
    def part(self) -> dict[str, Any]:
        """What this rank alone adds to :meth:`state_dict`. Every rank calls it.

        Tensors are the runtime's own, which the next step may change; those of which each rank has
        a share are DTensors.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, but for the data; a copy, on every rank.

        Every rank calls it. Any runtime that follows the same update rule can go on from it.
        """
        part = self.part()
        if self.world is None:
            return joined([copy.deepcopy(part)])
        return joined(self.world.gather(map_tensors(Tensor.cpu, part)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, by whichever runtime. Every rank calls it.

        Weights and optimizer states of other stages than :attr:`own` may be meta tensors.

        Raises:
            ValueError: the state is of other stages, lacks weights that the schedule reads, or is
                formed otherwise than this runtime's.
        """

        def check() -> None:
            check_state(state, self.schedule, self._updaters, self._form, self.own)

        if self.world is None:
            check()
        else:
            self.world.agree(check)
        self._load(state)
        self.steps_done = state["steps_done"]

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that has been checked."""

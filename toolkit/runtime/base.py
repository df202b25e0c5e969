"""The base class of all runtimes."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError, whole
from toolkit.model import Stages
from toolkit.runtime.checks import check_fit
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.microbatches import Batch, BatchReader, StepResult
from toolkit.runtime.process_group.group import World
from toolkit.runtime.stage import Values
from toolkit.runtime.state import check_state, form_of, joined
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import MakeOptimizer, Updater, Weights, join_averages
from toolkit.schedule import Schedule

Steps = Generator[StepResult, None, None]


class Runtime(ABC):
    """Trains a model on global batches, as one of ``n_ranks`` processes that make the same calls.

    Args:
        stages: the model, partitioned.
        schedule: a schedule of as many stages.
        optimizer: function from the list of a stage's parameters to its optimizer.
        options: how stages compute and update.

    Attributes:
        world: the processes that train together; None where there is one.
        steps_done: training steps until now.
        distributed: whether each rank of the schedule is a process of its own.

    Raises:
        UserError: stages, schedule, optimizer and options do not fit.
    """

    world: World | None = None
    distributed = True  # whether each rank of the schedule is a process
    _overlaps = False  # whether updates are all in only when a run has come to its end
    _way_out = "load a state"

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        options: StepOptions = PLAIN,
    ) -> None:
        check_fit(stages, schedule, optimizer, options)
        self.stages = stages
        self.schedule = schedule
        self.steps_done = 0
        self._form = form_of(stages)
        self._unfinished: Steps | None = None
        self._updaters: Sequence[Updater] = ()  # of each stage
        devices = {parameter.device for parameter in stages.model.parameters()}
        self._device = devices.pop() if len(devices) == 1 else None

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError if the runtime cannot run ``schedule``; by default it runs any."""
        return

    @classmethod
    def can_run(cls, schedule: Schedule) -> bool:
        """Whether the runtime can run ``schedule``."""
        try:
            cls.check_schedule(schedule)
        except UserError:
            return False
        return True

    @property
    def measures(self) -> bool:
        """Whether :meth:`measurements` has something to return."""
        return False

    def measurements(self) -> Measurements:
        """Return what all ranks measured. Every rank calls it.

        Raises:
            UserError: the runtime measured nothing.
        """
        raise UserError(f"{type(self).__name__} measures nothing: use Distributed with record=1")

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
            UserError: the batch cannot be divided into micro-batches of equal size.
        """
        (result,) = self.run([(inputs, targets)])
        return result

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each global batch; yield each step's result, of this rank's micro-batches.

        Where steps overlap (order "scheduled", :class:`~toolkit.runtime.Distributed`) a result
        can precede its step's last update. There every rank has to exhaust a run before it asks
        for anything that has weights in it, or runs again; elsewhere one may leave it.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`; those of a run of ``Distributed``
                are all of the same size. Of batches that are
                :class:`~toolkit.runtime.microbatches.Divisible` a rank loads only what it reads.
            n_steps: how many of them to take; all unless given.

        Raises:
            UserError: a batch cannot be divided, n_steps is no number of steps, there are fewer
                batches or, where steps overlap, their number is not known or the run before was
                not exhausted.
        """
        self._check_ended()
        n_steps = None if n_steps is None else whole(n_steps, "n_steps", 0)
        source = self._source(batches)
        if not self._overlaps:
            yield from self._steps(source, n_steps)
            return
        if n_steps is None:
            if not isinstance(batches, Sized):
                raise UserError("steps overlap, so that run() looks ahead: give n_steps to it")
            n_steps = len(batches)
        if n_steps < 1:
            return
        source.look()
        steps = self._steps(source, n_steps)
        self._unfinished = steps  # and so it stays where this is left, or there is an error
        yield from steps
        if self._unfinished is steps:
            self._unfinished = None

    @abstractmethod
    def _steps(self, source: BatchReader, n_steps: int | None) -> Steps:
        """Train on ``n_steps`` of the batches, or all. Where steps overlap the number is known."""

    def _check_ended(self) -> None:
        if self._unfinished is not None:
            raise UserError(
                "the last run() was not exhausted, and its last updates are missing: exhaust it, or"
                f" {self._way_out}"
            )

    def _reads(self, step: int) -> Sequence[int]:
        """The micro-batches that this rank reads at ``step``, ascending: all, unless it says."""
        return range(self.schedule.n_microbatches)

    def _source(self, batches: Iterable[Batch]) -> BatchReader:
        """What this rank reads of ``batches``, the first of which is of the next step."""
        n = self.schedule.n_microbatches
        return BatchReader(batches, n, self._reads, self.steps_done, self._device)

    def module(self) -> nn.Module:
        """The whole model with the newest weights, on every rank. Every rank calls it.

        To go on from other weights, load a state: a change to the model is one of its newest
        version alone, and a schedule may still read older ones.
        """
        self._check_ended()
        return self._module()

    @abstractmethod
    def _module(self) -> nn.Module: ...

    def averages(self) -> Weights:
        """The average of each trained parameter and running statistic, by its name; or nothing.

        On every rank; every rank calls it.
        """
        self._check_ended()
        return self._averages()

    def _averages(self) -> Weights:
        return join_averages(self._updaters)

    def skipped(self) -> list[int]:
        """How many updates of each stage were left out, as their gradient was not finite.

        Every rank calls it.
        """
        self._check_ended()
        counted = torch.zeros(len(self.stages), 2, dtype=torch.int64)
        for j, updater in enumerate(self._updaters):
            if j in self.own:
                counted[j] = torch.tensor([updater.n_skipped, 1])
        left_out, ranks = self.total(counted).unbind(1)
        return (left_out // ranks.clamp(min=1)).tolist()

    def part(self) -> dict[str, Any]:
        """What this rank alone adds to :meth:`state_dict`. Every rank calls it.

        Tensors are the runtime's own, which the next step may change; those of which each rank has
        a share are DTensors.
        """
        self._check_ended()
        return self._part()

    @abstractmethod
    def _part(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state except the position in the data, on every rank.

        Every rank calls it. Any runtime with the same update rule can load it.
        """
        part = self.part()
        if self.world is None:
            return joined([copy.deepcopy(part)])
        return joined(self.world.gather(tree_map_only(Tensor, Tensor.cpu, part)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, taken by any runtime. Every rank calls it.

        Weights and optimizer states of other stages than :attr:`own` may be meta tensors. Where
        steps overlap it ends a run that was not exhausted; ``Distributed`` refuses that.

        Raises:
            UserError: the state is of other stages, lacks weights that the schedule reads, or is
                formed otherwise than this runtime's.
        """

        def check() -> None:
            check_state(state, self.schedule, self._updaters, self._form, self.own)

        if self.world is None:
            check()
        else:
            self.world.agree(check)
        if self._unfinished is not None:
            self._unfinished.close()
            self._unfinished = None
        self._load(state)
        self.steps_done = state["steps_done"]

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that has been checked."""

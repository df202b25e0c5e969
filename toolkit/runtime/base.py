"""The interface of all runtimes."""

import sys
from abc import ABC, abstractmethod
from collections.abc import (
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Sized,
)
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.cost import Costs, Hardware
from toolkit.errors import UserError, whole
from toolkit.model import Stages
from toolkit.runtime.losses import checked_loss
from toolkit.runtime.make_optimizer import MakeOptimizer, MakeScheduler
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.microbatches import BatchReader, GlobalBatch, StepResult
from toolkit.runtime.process_group.world import World
from toolkit.runtime.runtime_arguments import check_arguments
from toolkit.runtime.step_options import PLAIN, Loss, StepOptions
from toolkit.runtime.updater import Weights
from toolkit.schedule import Schedule, switched

Steps = Generator[StepResult, None, None]


@dataclass(eq=False, repr=False)
class Runtime(ABC):
    """Trains a model on global batches, as one of ``n_ranks`` processes that make the same calls.

    Where steps overlap, the methods raise UserError while a :meth:`run` is not exhausted. Those
    that compute in the calling process are :class:`~toolkit.runtime.local_runtime.LocalRuntime`.

    Args:
        stages: the model, partitioned, on the device of this process.
        schedule: a schedule of as many stages.
        optimizer: function from the list of a stage's parameters to its optimizer. Mark a function
            that takes pairs of name and parameter by :func:`toolkit.runtime.by_name`.
        loss: from what the model returns and targets, the mean loss of a micro-batch; or its
            ``(sum, count)``, if a step is to weigh each token or sample alike.
        lr_scheduler: function from a stage's optimizer to its learning-rate schedule, which
            advances with each update of the stage.
        seed: seed of the model's random draws in training, such as dropout.
        options: how stages compute and update.

    Attributes:
        steps_done: number of training steps so far.
        schedule_plan: the given schedule; ``schedule`` is that of the next step.
        distributed: whether each rank of the schedule is a process of its own.
        knows_costs: whether it can measure its stages and links while it trains; see
            :meth:`costs`.

    Raises:
        UserError: stages, schedule, optimizer, loss, options and ranks do not fit together.
    """

    stages: Stages
    schedule: Schedule
    optimizer: MakeOptimizer
    loss: Loss
    _: KW_ONLY
    lr_scheduler: MakeScheduler | None = None
    seed: int = 0
    options: StepOptions = PLAIN

    distributed = False
    knows_costs = False
    # Whether the last updates are complete only when a run is exhausted.
    _overlaps = False
    _way_out = "load a state"
    _same_sized = False  # whether all batches of a run have one shape
    # Whether all gradients of a step are known before its first update.
    _whole_step = False

    def __post_init__(self) -> None:
        check_arguments(
            self.stages, self.schedule, self.optimizer, self.loss, self.options
        )
        self.steps_done = 0
        self.schedule_plan = self.schedule
        self.check_schedule_plan(self.schedule_plan)
        self.schedule = self.schedule_plan.at(0)
        self._loss = checked_loss(self.loss, self.options, self.stages.results)
        self._unfinished: Steps | None = None
        devices = {parameter.device for parameter in self.stages.model.parameters()}
        self._device: torch.device | None = None
        if len(devices) == 1:
            self._device = devices.pop()

    # What a runtime can do.

    @classmethod
    def check_schedule(cls, schedule: Schedule) -> None:
        """Raise UserError if the runtime cannot run ``schedule``; by default it runs any."""
        return

    @classmethod
    def check_installed(cls) -> None:
        """Raise UserError if a package that the runtime needs is missing."""
        return

    @classmethod
    def can_run(cls, schedule: Schedule) -> bool:
        """Whether the runtime can run ``schedule``."""
        try:
            cls.check_schedule(schedule)
        except UserError:
            return False
        return True

    def check_schedule_plan(self, schedule_plan: Schedule) -> None:
        """Raise UserError if the runtime cannot run a schedule of the plan, or its options."""
        for step in (0, *schedule_plan.changes(range(sys.maxsize))):
            self.check_schedule(schedule_plan.at(step))
            self._check_options(schedule_plan.at(step))

    def _check_options(self, schedule: Schedule) -> None:
        self.options.check(schedule, whole_step=self._whole_step)

    # The ranks.

    @property
    def world(self) -> World | None:
        """The processes that train together; None for a single process."""
        return None

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""
        if self.world is None:
            return 0
        return self.world.rank

    @property
    def n_ranks(self) -> int:
        """Number of processes that train together."""
        if self.world is None:
            return 1
        return self.world.size

    @property
    def writes(self) -> bool:
        """Whether this process writes files for all: the first rank's first device."""
        return self.rank == 0

    @property
    def updated_stages(self) -> Collection[int]:
        """The stages that this rank updates; by default all of them."""
        return range(len(self.stages))

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, on every rank. Every rank calls it.

        Args:
            values: this rank's, of the same shape and type on every rank.
        """
        if self.world is None:
            return values
        return self.world.total(values)

    # Training.

    def step(self, inputs: Any, targets: Tensor) -> StepResult:
        """Run one training step, to its last update; return the results of this rank.

        Args:
            inputs: ``[n_microbatches * b, ...]``, or a tuple or dictionary of such tensors as in
                the example of :func:`toolkit.model.partition`, the same on every rank and on any
                device; micro-batch m is slice m.
            targets: ``[n_microbatches * b, ...]``.

        Raises:
            UserError: the batch cannot be divided into micro-batches of equal size.
        """
        # Unpacking exhausts the run: where steps overlap, the last updates follow the result.
        (result,) = self.run([(inputs, targets)])
        return result

    def run(
        self, batches: Iterable[GlobalBatch], n_steps: int | None = None
    ) -> Iterator[StepResult]:
        """Train on each global batch; yield the result of this rank's micro-batches.

        With overlapping steps (order "scheduled" and :class:`~toolkit.runtime.Distributed`) a
        result can precede its step's last update. Every rank must then exhaust the run before it
        reads weights or runs again.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`; all of one size for ``Distributed``.
                Of :class:`~toolkit.runtime.microbatches.Divisible` batches, a rank loads only the
                micro-batches that it reads.
            n_steps: number of batches to take; all by default.

        Raises:
            UserError: a batch cannot be divided, or there are fewer than n_steps. With overlapping
                steps: their number is unknown, or the previous run was not exhausted.
        """
        self._check_ended()
        if n_steps is None and self._overlaps:
            if not isinstance(batches, Sized):
                raise UserError("run() looks ahead, since steps overlap: give n_steps")
            n_steps = len(batches)
        if n_steps is not None:
            n_steps = whole(n_steps, "n_steps", 0)
        source = BatchReader(
            batches,
            self.schedule.n_microbatches,
            self._reads,
            self.steps_done,
            self._device,
            n_steps,
            same_sized=self._same_sized,
        )
        if not self._overlaps:
            yield from self._train_on(source)
        elif n_steps:
            # The first batch is checked before it is noted that updates will be missing.
            source.look()
            # Stays set if the caller leaves the run or a step raises: updates are missing then.
            steps = self._train_on(source)
            self._unfinished = steps
            yield from steps
            # Another run may have begun, if a state was loaded within this one.
            if self._unfinished is steps:
                self._unfinished = None

    @abstractmethod
    def _train_on(self, source: BatchReader) -> Steps:
        """Train on the batches of ``source``, by one schedule of the plan after another."""

    def _reads(self, step: int) -> Sequence[int]:
        """Return the micro-batches that this rank reads at ``step``, ascending; by default all."""
        return range(self.schedule.n_microbatches)

    def _check_ended(self) -> None:
        if self._unfinished:
            raise UserError(
                "the last run() was not exhausted, and its last updates are missing: exhaust it, or"
                f" {self._way_out}"
            )

    def switch(self, schedule: Schedule) -> None:
        """Train by ``schedule`` from the next step on, with all state. Every rank calls it.

        Args:
            schedule: without phases; of as many stages, micro-batches and ranks as before.

        Raises:
            UserError: sizes differ, the runtime cannot run it, or a run was not exhausted.
        """
        self.set_schedule(switched(self.schedule_plan, self.steps_done, schedule))

    @abstractmethod
    def set_schedule(self, schedule_plan: Schedule) -> None:
        """Train by ``schedule_plan`` from the next step on, with all state. Every rank calls it.

        Args:
            schedule_plan: its schedules before the next step are those of the present plan; before
                a state is loaded, those that led to the state.
        """

    # Weights and states.

    @abstractmethod
    def module(self) -> nn.Module:
        """Return the whole model with the newest weights, on every rank. Every rank calls it.

        Do not change its weights: a schedule may still read older versions. Load a state instead.
        """

    @abstractmethod
    def averages(self) -> Weights:
        """Return the average of each trained parameter and running statistic, by name.

        The same on every rank; empty without ``options.ema``. Every rank calls it.
        """

    @torch.no_grad()
    def extrapolated(self) -> Weights:
        """Return the weights one update further, by name, of the stages that read late weights.

        2 theta_t - theta_{t-1}: with the correction ``extrapolate`` and all weights one step late
        (and no weight decay) that is the model of error feedback, x_{t+1} = x_t - 2 u_t + u_{t-1}
        (arXiv 2606.30634), whose gradients are those of x_{t-1}. Every rank calls it.
        """
        weights: Weights = {}
        for stage, versions in self.local_state()["versions"].items():
            if self.steps_done - 1 in versions and any(self.schedule.staleness[stage]):
                previous = versions[self.steps_done - 1]
                for name, newest in versions[self.steps_done].items():
                    # At 2.0: previous + 2 (newest - previous).
                    weights[name] = torch.lerp(previous[name], newest, 2.0)
        return self._gathered(weights)

    @torch.no_grad()
    def late_weights(self) -> Weights:
        """Return the late weights that micro-batch 0 reads in the next training step, by name.

        Without those of stages on which it reads the newest. Every rank calls it.
        """
        schedule = self.schedule.at(self.steps_done)
        weights: Weights = {}
        for stage, versions in self.local_state()["versions"].items():
            version = schedule.version(stage, 0, self.steps_done)
            if version < self.steps_done and version in versions:
                for name, tensor in versions[version].items():
                    weights[name] = tensor.clone()
        return self._gathered(weights)

    def _gathered(self, weights: Weights) -> Weights:
        """Return the weights of all ranks, on this one's device. Every rank calls it."""
        if self.world:
            # Ranks exchange pickles: a tensor of a GPU would come back on its sender's GPU.
            on_cpu = {name: tensor.cpu() for name, tensor in weights.items()}
            for rank_weights in self.world.gather(on_cpu, "weights"):
                for name, tensor in rank_weights.items():
                    if name not in weights:
                        weights[name] = tensor.to(self._device)
        return weights

    @abstractmethod
    def skipped(self) -> list[int]:
        """Return each stage's number of updates skipped as not finite. Every rank calls it."""

    @abstractmethod
    def local_state(self) -> dict[str, Any]:
        """Return what this rank alone adds to :meth:`state_dict`. Every rank calls it.

        Its tensors are the runtime's own, which the next step may change. Tensors that ranks share
        are DTensors.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state except the position in the data, on every rank.

        Every rank calls it. Any runtime with the same update rule can load it.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, taken by any runtime. Every rank calls it.

        It ends a run that was not exhausted, except for ``Distributed``, which refuses.

        Args:
            state: as :meth:`state_dict` returns it; weights and optimizer states of stages that
                are not in :attr:`updated_stages` may be meta tensors.

        Raises:
            UserError: the state is of other stages, lacks weights that the schedule reads, or has
                another form than this runtime's.
        """

    # What it measures.

    @property
    def measures(self) -> bool:
        """Whether :meth:`measurements` has something to return."""
        return False

    def measurements(self) -> Measurements:
        """Return what all ranks measured; UserError if nothing was. Every rank calls it."""
        raise UserError(
            f"{type(self).__name__} measures nothing: use Distributed with record=1"
        )

    def time_costs(self, n_steps: int) -> None:
        """Time ops, for :meth:`costs`; by default, none.

        Args:
            n_steps: number of training steps, from the next one, whose ops are timed.
        """
        return

    def costs(self) -> tuple[Costs, Hardware]:
        """Return the costs of stages, as timed last, and of links as they are now.

        Every rank calls it, between runs.

        Raises:
            UserError: nothing was timed, or the runtime does not know its costs.
        """
        raise UserError(
            f"{type(self).__name__} does not know its costs: use Distributed"
        )

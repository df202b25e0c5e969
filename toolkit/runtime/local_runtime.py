"""Runtimes whose stages, weights and updates are in the calling process."""

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from toolkit.cost.boundary_compression import check_boundary_compression
from toolkit.cost.compression import MessageCode
from toolkit.errors import UserError
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.boundary_codes import BoundaryCodes
from toolkit.runtime.microbatches import BatchReader
from toolkit.runtime.process_group.join import join
from toolkit.runtime.process_group.world import World
from toolkit.runtime.rank_compression import (
    RankCompressor,
    check_handed_on,
    check_ranks_state,
    travelling_stages,
)
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import check_state, form_of, join_states
from toolkit.runtime.updater import Updater, Weights
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.runtime.sharded_stage import ShardedStage


class LocalRuntime(Runtime):
    """A runtime that updates stages itself.

    A subclass sets ``_updaters``, one for each stage, and says in ``_steps`` how it trains,
    in ``_local_state`` and ``_load`` what its state is.
    """

    # Of gradients that are handed from rank to rank.
    _gradient_code: MessageCode | None = None
    boundary_compression = "none"
    _follows_schedule = False  # whether it hands them on as the schedule's program says

    def __post_init__(self) -> None:
        super().__post_init__()
        check_boundary_compression(
            self.boundary_compression, [self.schedule_plan], self._devices_per_rank()
        )
        self._boundary_codes = BoundaryCodes.of(self.stages, self.boundary_compression)
        self._form = form_of(self.stages)
        self._updaters: Sequence[Updater] = ()  # of each stage
        # Of the ranks in this process.
        self._compressors: dict[int, RankCompressor] = {}

    def _devices_per_rank(self) -> int:
        return 1

    def _make_runners(self) -> list[StageRunner]:
        runners = []
        for index, stage in enumerate(self.stages):
            runner = StageRunner(
                stage,
                index,
                self.optimizer,
                self.lr_scheduler,
                self.seed,
                self.options,
                self._sharded_stage(index),
            )
            runners.append(runner)
        return runners

    def check_schedule_plan(self, schedule_plan: Schedule) -> None:
        """Refuse what the runtime cannot run; see :meth:`Runtime.check_schedule_plan`."""
        super().check_schedule_plan(schedule_plan)
        if self._gradient_code is not None:
            check_handed_on(schedule_plan, self._gradient_code)

    def _make_compressors(
        self, ranks: Iterable[int], versions: Mapping[int, dict[int, Weights]]
    ) -> None:
        """Make what compresses the messages that ``ranks`` hand on, if they are compressed."""
        if self._gradient_code is None:
            return
        for rank in ranks:
            compressor = RankCompressor.of(self.schedule, rank, self._gradient_code)
            compressor.weights.encode_all(versions)
            self._compressors[rank] = compressor
        # The owner, too, computes with the rounded weights, so that no placement changes the
        # trajectory.
        for stage in travelling_stages(self.schedule):
            self._updaters[stage].is_rounded = True

    def _stage_sizes(self) -> dict[int, int]:
        """Return the numbers of the trained weights of each stage."""
        sizes = {}
        for stage, updater in enumerate(self._updaters):
            # Not of the weights themselves: they are empty where a rank lacks the stage.
            sizes[stage] = sum(self._form[name].numel() for name in updater.masters)
        return sizes

    def _sharded_stage(self, index: int) -> "ShardedStage | None":
        """Return a stage on the devices of a rank; None where a rank is one device."""
        return None

    # Training.

    def _train_on(self, source: BatchReader) -> Steps:
        self._use_schedule_of(self.steps_done)
        if self.schedule_plan.next_change(self.steps_done) is None:
            return self._steps(source)
        return self._across_changes(source)

    def _across_changes(self, source: BatchReader) -> Steps:
        """Train by one schedule after another."""
        while (change := self.schedule_plan.next_change(self.steps_done)) is not None:
            yield from self._steps(source.take(change - self.steps_done))
            # The batches have ended.
            if self.steps_done < change or source.n_steps == 0:
                return
            # All updates are complete here: the pipeline has drained.
            self._use_schedule_of(change)
        yield from self._steps(source)

    @abstractmethod
    def _steps(self, source: BatchReader) -> Steps:
        """Train on the batches of ``source``. With overlapping steps their number is known."""

    def set_schedule(self, schedule_plan: Schedule) -> None:
        """Train by ``schedule_plan`` from the next step on; see :meth:`Runtime.set_schedule`."""
        self._check_ended()
        if self._gradient_code is not None:
            raise UserError(
                f"compression={self._gradient_code.name} takes one schedule, since a message"
                " depends on the one before: got another in training; use compression=bf16"
            )
        self.check_schedule_plan(schedule_plan)
        self.schedule_plan = schedule_plan
        self._use_schedule_of(self.steps_done)

    def _use_schedule_of(self, step: int) -> None:
        """Go over to the schedule of ``step``, with all state. Every rank calls it."""
        schedule = self.schedule_plan.at(step)
        if self.schedule is not schedule:
            self._go_over(schedule)

    def _go_over(self, schedule: Schedule) -> None:
        """Train by another schedule, with all state."""
        state = self._joined_state()
        self._adopt(schedule)
        self._load(state)

    def _adopt(self, schedule: Schedule) -> None:
        """Train by another schedule; a state is loaded next."""
        self.schedule = schedule

    # Weights and states.

    def averages(self) -> Weights:
        """Return the averages of weights and running statistics; see :meth:`Runtime.averages`."""
        self._check_ended()
        averages: Weights = {}
        for updater in self._updaters:
            averages |= updater.averages
        return averages

    def skipped(self) -> list[int]:
        """Return each stage's number of updates skipped as not finite. Every rank calls it."""
        self._check_ended()
        counts = torch.zeros(len(self.stages), 2, dtype=torch.int64)
        for stage in self.updated_stages:
            counts[stage] = torch.tensor([self._updaters[stage].n_skipped, 1])
        # Several ranks may update a stage, and count alike: divide the sum by their number.
        skipped, ranks = self.total(counts).unbind(1)
        return (skipped // ranks.clamp(min=1)).tolist()

    def local_state(self) -> dict[str, Any]:
        """Return what this rank alone adds to the state; see :meth:`Runtime.local_state`."""
        self._check_ended()
        return self._local_state()

    @abstractmethod
    def _local_state(self) -> dict[str, Any]:
        """Return :meth:`local_state`, also within a run, where one schedule follows another."""

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state on every rank; see :meth:`Runtime.state_dict`."""
        self._check_ended()
        return self._joined_state()

    def _joined_state(self) -> dict[str, Any]:
        local_state = self._local_state()
        if not self.world:
            return join_states([copy.deepcopy(local_state)])
        on_cpu = tree_map_only(Tensor, Tensor.cpu, local_state)
        return join_states(self.world.gather(on_cpu, "states"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        # 1. The schedule of that step: the state is checked against what it reads.
        step = state.get("steps_done")
        if not isinstance(step, int) or step < 0:  # refused below
            step = 0
        schedule = self.schedule_plan.at(step)
        if schedule is not self.schedule:
            self._adopt(schedule)

        def check() -> None:
            check_state(
                state, self.schedule, self._updaters, self._form, self.updated_stages
            )
            if self._follows_schedule:
                check_ranks_state(state, self._stage_sizes(), self._gradient_code)

        # 2. All ranks refuse a state, or none does: the others would wait for one that raised.
        if self.world:
            self.world.agree(check)
        else:
            check()
        # 3. An unfinished run would continue with versions of before.
        if self._unfinished:
            self._unfinished.close()
            self._unfinished = None
        self._load(state)
        self.steps_done = state["steps_done"]

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Take over a state that has been checked."""


@dataclass(eq=False, repr=False, kw_only=True)
class OnRanks(LocalRuntime):
    """A runtime whose ranks are processes of their own.

    Args:
        world: the ranks; those of this job by default.
    """

    # The ranks are known once the arguments have been checked.
    world: World = cast(World, None)

    distributed = True

    def __post_init__(self) -> None:
        super().__post_init__()
        devices = {tensor.device for tensor in self.stages.model.parameters()}
        n_ranks = self.schedule.n_ranks
        n_processes = n_ranks * self._devices_per_rank()
        if self.world is None:
            on_cpu = all(device.type == "cpu" for device in devices)
            self.world = join(n_processes, device="cpu" if on_cpu else "auto")
        if self.world.size != n_processes:
            of_devices = ""
            if n_processes > n_ranks:
                of_devices = f" of {n_processes // n_ranks} devices"
            raise UserError(
                f"the schedule has {n_ranks} ranks{of_devices} and the world {self.world.size}:"
                f" give world.part({n_processes}), or a schedule for {self.world.size}"
            )
        other_devices = sorted(map(str, devices - {self.world.device}))
        if other_devices:
            raise UserError(
                f"rank {self.rank} computes on {self.world.device} and the model is on"
                f" {', '.join(other_devices)}: move it with model.to(world.device) before"
                " partition()"
            )

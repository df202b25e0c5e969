"""The training that a controller's ranks carry out, as a runtime of the caller's process.

The caller's process reads the batches, cuts them, and sends each rank the micro-batches that it
reads, a few training steps ahead; a rank answers with its losses. All other messages travel
between the ranks::

    caller    sends step 0, 1, 2, 3 | gets losses of 0, sends 4 | gets losses of 1, sends 5 | ...
    rank 0         trains 0          | 1                         | 2                         | ...
    rank 1         trains 0          | 1                         | 2                         | ...
"""

import contextlib
import copy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from toolkit.errors import UserError, whole
from toolkit.model import Stages
from toolkit.runtime import controlled_rank
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.losses import LossValue
from toolkit.runtime.make_optimizer import MakeOptimizer
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.microbatches import (
    BatchReader,
    Share,
    microbatches_read,
    packed,
    step_result,
)
from toolkit.runtime.process_group.watch import JobFailedError
from toolkit.runtime.rank_pool import RankPool, shared
from toolkit.runtime.recovery_row import Recovery
from toolkit.runtime.state import join_states, merged
from toolkit.runtime.step_options import Loss
from toolkit.runtime.stretch import Stretch, steps_ahead
from toolkit.runtime.updater import Weights
from toolkit.schedule import Schedule
from toolkit.terminal import show

_MAX_ATTEMPTS = 3  # to train one stretch; each attempt but the last loses a rank


class Controlled(Runtime):
    """Trains stages by a schedule on the ranks of a controller, as :class:`Distributed` does.

    To its caller it is one process with all micro-batches. Results have the losses of all of them,
    and no outputs, which stay on their ranks.

    Args:
        stages: the model, partitioned. It is trained where its copies are, and gets the weights by
            :meth:`module`.
        schedule, optimizer, loss: as in ``Runtime``.
        controller: whose ranks train; by default that of this process, which it then makes.
        keep_every: training steps after which updates are completed and this process keeps a copy
            of all state. If a rank is lost, all start again from there, and repeat at most so many
            steps on the same data, with the same results. None: a lost rank ends the training.
        **arguments: ``lr_scheduler``, ``seed`` and ``options`` as in ``Runtime``; other arguments
            of ``Distributed``, such as ``record``, or ``width`` and ``parallelize``, with which the
            controller has ``width`` processes a rank; ``backend``, ``timeout`` and ``interface`` of
            the default controller, as of :class:`Controller`.

    Attributes:
        width: number of processes of a rank.
        kept: the latest copy, as :meth:`state_dict` returns it; None before the first.
        recoveries: a row for each time that a rank was lost.

    Raises:
        UserError: the arguments do not fit together, or cannot be pickled.
    """

    _overlaps = _same_sized = True
    _way_out = "load a state, such as the one kept last"

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        *,
        controller: RankPool | None = None,
        keep_every: int | None = None,
        **arguments: Any,
    ) -> None:
        join_options = {"backend": "auto", "timeout": 120.0, "interface": None}
        for name in join_options.keys() & arguments.keys():
            join_options[name] = arguments.pop(name)
        # The ranks get these, too.
        names = {"lr_scheduler", "seed", "options"} & arguments.keys()
        runtime_arguments = {name: arguments[name] for name in names}
        super().__init__(stages, schedule, optimizer, loss, **runtime_arguments)

        # No mesh: this process is none of the devices.
        self.width = whole(arguments.get("width", 1), "width", 1)
        n_processes = schedule.n_ranks * self.width
        if controller is None:
            controller = shared(n_processes, **join_options)
        self._processes = controller.processes
        if self._processes.n_ranks != n_processes:
            of_devices = ""
            if self.width > 1:
                of_devices = f" of {self.width} devices"
            raise UserError(
                f"the schedule has {schedule.n_ranks} ranks{of_devices} and the controller"
                f" {self._processes.n_ranks} processes: use Controller(ranks={n_processes})"
            )
        on_cpu = self._device is not None and self._device.type == "cpu"
        self._device = None  # batches are cut where they are
        self._join_options = controller.join_options | {
            "device": "cpu" if on_cpu else "auto"
        }
        self._arguments = arguments
        self._controller = controller
        self._measures = False
        self._keep_every: int | None = None
        if keep_every is not None:
            self._keep_every = whole(keep_every, "keep_every", 1)
        self.kept: dict[str, Any] | None = None
        self.recoveries: list[Recovery] = []
        try:
            self._build_on_ranks()
        except JobFailedError as error:
            if self._keep_every is None:
                raise
            self._restore(None, str(error))

    # The ranks.

    def _build_on_ranks(self) -> None:
        """Have the ranks make what they train."""
        training = (self.stages, self.schedule_plan, self.optimizer, self.loss)
        self._processes.call(
            controlled_rank.join_training, training, self._join_options, self._arguments
        )
        self._controller.runtime = self
        self._n_starts = self._processes.n_starts

    def _ranks_have_training(self) -> bool:
        """Whether the ranks that made this training still run, and made no other since."""
        is_latest = self._controller.runtime is self
        # ready() comes before the comparison: it notices ranks that have ended.
        return (
            is_latest
            and self._processes.ready()
            and self._processes.n_starts == self._n_starts
        )

    def _ensure_ranks(self) -> None:
        """Return once the ranks have this training: from the kept state, if they lost it.

        Raises:
            JobFailedError: ranks of this training have ended, and its state is not kept.
            UserError: they train another one, and its state is not kept.
        """
        if self._ranks_have_training():
            return
        if not self._keeps_present_state():
            if self._controller.runtime is self:
                raise JobFailedError(
                    "the ranks have ended: load a state, or give keep_every="
                )
            raise UserError(
                "the ranks no longer have this training, since they train another: load a state"
            )
        self._restore(self.kept, "the ranks ended, or trained another")

    def _keeps_present_state(self) -> bool:
        """Whether the kept state is that of the last training step."""
        if self.kept is None:  # the ranks begin with the weights of the stages here
            return self._keep_every is not None and self.steps_done == 0
        return bool(self.kept["steps_done"] == self.steps_done)

    def _restore(self, state: Mapping[str, Any] | None, reason: str = "") -> None:
        """Have ranks that lack this training continue from ``state``; None: from the beginning."""
        start = time.perf_counter()
        self._build_on_ranks()
        restart = 0
        if state is not None:
            restart = state["steps_done"]
            try:
                self._processes.call(
                    controlled_rank.call_method, "load_state_dict", state
                )
            except BaseException:
                # The ranks have other weights than this training.
                self._controller.runtime = None
                raise
        if reason:
            show(f"{reason}; training continues from step {restart}", sys.stderr)
            seconds = time.perf_counter() - start
            self.recoveries.append(Recovery(reason, self.steps_done, restart, seconds))

    def _call_on_ranks(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every process's ``Distributed``; return the results, ``[process]``.

        Where a rank is lost meanwhile, the ranks continue from the kept state and are asked again.
        """
        reason = ""
        n_lost = 0
        while True:
            try:
                self._restore_if_lost(reason)
                self._begin(controlled_rank.call_method, method, *args)
                list(self._processes.reports())  # none
                return self._processes.results()
            except JobFailedError as error:
                n_lost += 1
                if not self._keeps_present_state() or n_lost == _MAX_ATTEMPTS:
                    raise
                reason = str(error)

    def _restore_if_lost(self, reason: str) -> None:
        """Restore the kept state if a rank was lost for ``reason``, or has ended meanwhile."""
        if reason:
            self._restore(self.kept, reason)
        else:
            self._ensure_ranks()

    def _begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin a call on ranks that have this training.

        Raises:
            JobFailedError: a rank died while it waited.
        """
        self._processes.begin(function, *args)
        # begin() starts new ranks where a rank died while it waited. They do not have this
        # training, and would wait for it for ever: the caller restores it.
        if self._processes.n_starts != self._n_starts:
            raise JobFailedError("a rank died while it waited")

    # Training.

    def _train_on(self, source: BatchReader) -> Steps:
        """Train in stretches of ``keep_every`` steps; repeat one in which a rank is lost."""
        assert source.n_steps is not None  # known, since steps overlap
        end = self.steps_done + source.n_steps
        # The first stretch, too, needs a state to repeat it from.
        if self._keep_every and (self.kept is None or not self._keeps_present_state()):
            self.kept = join_states(self._local_states())
        while self.steps_done < end:
            length = min(end - self.steps_done, self._keep_every or end)
            stretch = Stretch(self.steps_done, length)
            # A rank that is lost each time fails for a reason that a restart does not cure.
            n_lost = 0
            reason = ""
            while True:
                try:
                    self._restore_if_lost(reason)
                    yield from self._train_stretch(stretch, source)
                    break
                except JobFailedError as error:
                    n_lost += 1
                    if self.kept is None or n_lost == _MAX_ATTEMPTS:
                        raise
                    reason = str(error)
            self.schedule = self.schedule_plan.at(self.steps_done)

    def _train_stretch(self, stretch: Stretch, source: BatchReader) -> Steps:
        """Send the ranks their data, a few steps ahead, and collect their losses.

        Yields a result of each step that has had none, so that a repeated step has one only.
        """
        first_step = stretch.first_step
        self._begin(
            controlled_rank.train_steps, stretch.n_steps, self._keep_every is not None
        )

        # Data go out a few steps ahead, so that no rank waits for this process between two steps.
        n_ahead = steps_ahead(self.schedule_plan, first_step, stretch.n_steps)
        losses_of_step: defaultdict[int, dict[int, LossValue]] = defaultdict(dict)
        next_step = first_step  # whose losses are not complete
        n_sent = 0
        # Closed also if the caller leaves: the ranks, which still run the call, are then ended.
        with contextlib.closing(self._processes.reports()) as reports:
            while True:
                while n_sent < min(stretch.n_steps, next_step - first_step + n_ahead):
                    if n_sent == len(stretch.shares):
                        stretch.shares.append(next(source))
                    self._send(stretch.shares[n_sent], first_step + n_sent)
                    if self._keep_every is None:
                        # Nothing is repeated: free its memory.
                        stretch.shares[n_sent] = None
                    n_sent += 1
                try:
                    _, (step, losses) = next(reports)
                except StopIteration:
                    break
                # Ranks report in any order, and a rank may be steps ahead of another.
                losses_of_step[step] |= losses
                while len(losses_of_step[next_step]) == self.schedule.n_microbatches:
                    losses = losses_of_step.pop(next_step)
                    next_step += 1
                    if next_step > self.steps_done:
                        self.steps_done = next_step
                        yield step_result(next_step - 1, losses, torch.empty(0))

        measured, local_states = zip(*self._processes.results(), strict=True)
        self._measures = any(measured)
        if self._keep_every is not None:
            self.kept = join_states(local_states[:: self.width])

    def _send(self, share: Share, step: int) -> None:
        """Send each rank the micro-batches of ``share`` that it reads at ``step``."""
        assert share is not None
        inputs, targets = share
        n_microbatches = self.schedule.n_microbatches
        chunked = [tensor.chunk(n_microbatches) for tensor in (*inputs, targets)]
        # Ranks that read the same micro-batches get one message, which is pickled once.
        receivers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        # Consecutive processes are the devices of a rank.
        for process in range(self._processes.n_ranks):
            rank = process // self.width
            read = tuple(microbatches_read(self.schedule_plan, rank, step))
            receivers[read].append(process)
        for microbatches, processes in receivers.items():
            if microbatches:
                *rank_inputs, rank_targets = (
                    packed(chunks, microbatches) for chunks in chunked
                )
                self._processes.send((tuple(rank_inputs), rank_targets), processes)

    def set_schedule(self, schedule_plan: Schedule) -> None:
        """Train by ``schedule_plan`` from the next step on; see :meth:`Runtime.set_schedule`."""
        self._check_ended()
        self.check_schedule_plan(schedule_plan)
        self._call_on_ranks("set_schedule", schedule_plan)
        self.schedule_plan = schedule_plan
        self.schedule = schedule_plan.at(self.steps_done)

    # Weights, states and measurements.

    def module(self) -> nn.Module:
        """Return the given model, with the newest weights."""
        self._check_ended()
        state, *_ = self._call_on_ranks("module")
        self.stages.model.load_state_dict(state)
        return self.stages.model

    def averages(self) -> Weights:
        """Return the averages of weights and running statistics; see :meth:`Runtime.averages`."""
        self._check_ended()
        return self._call_on_ranks("averages")[0]

    def skipped(self) -> list[int]:
        """Return each stage's number of updates skipped as not finite."""
        self._check_ended()
        return self._call_on_ranks("skipped")[0]

    def local_state(self) -> dict[str, Any]:
        """Return what the ranks add to the state together; see :meth:`Runtime.local_state`."""
        self._check_ended()
        return reduce(merged, self._local_states())

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state; see :meth:`Runtime.state_dict`."""
        self._check_ended()
        return join_states(self._local_states())

    def _local_states(self) -> list[dict[str, Any]]:
        """Return what each rank adds to the state, which its first device sends."""
        return self._call_on_ranks("local_state")[:: self.width]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        try:
            if self._ranks_have_training():
                self._processes.call(
                    controlled_rank.call_method, "load_state_dict", state
                )
            else:
                self._restore(state)
        except JobFailedError as error:
            if self._keep_every is None:
                raise
            self._restore(state, str(error))
        # Only now: a state that the ranks refuse leaves this training as it was.
        self.kept = None
        if self._keep_every is not None:
            self.kept = copy.deepcopy(dict(state))  # the caller may change its own
        self._unfinished = None
        self.steps_done = state["steps_done"]
        self.schedule = self.schedule_plan.at(self.steps_done)

    @property
    def measures(self) -> bool:
        """Whether training steps have been measured."""
        return self._measures

    def measurements(self) -> Measurements:
        """Return what all ranks measured in the recorded steps."""
        self._check_ended()
        return self._call_on_ranks("measurements")[0]

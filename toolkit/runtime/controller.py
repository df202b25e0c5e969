"""One process that drives all ranks: it sends each the training once, then its data step by step.

The ranks are :class:`~toolkit.runtime.process_group.processes.Processes`, which stay alive from one
training to the next. Each makes the only executor, :class:`Distributed`, of what it is sent; stages
and functions are pickled by value, so a cell that has changed is used at once. The caller's process
reads the batches, cuts them, and sends each rank the micro-batches that it reads, a few training
steps ahead; a rank answers with its losses. All other messages travel between the ranks.

On this machine the ranks need no engine. PyTorch Monarch and Ray take 10 to 13 s to start four
actors and 2 to 3 ms a call, more than all that a controlled step adds to a step of ``Distributed``.
Their messages carry tensors at a half to a seventh of gloo's rate, so tensors stay on gloo or NCCL.
On several machines Ray starts a fork server on each, and does no more. Monarch's wheel (0.7.0) also
installs top-level packages ``tests`` and ``examples``, and its calls can time out where an actor
blocks its own thread, as a rank does.
"""

from __future__ import annotations

import contextlib
import html
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError, whole
from toolkit.model import Stages
from toolkit.runtime import controlled_rank
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.distributed import microbatches_read
from toolkit.runtime.losses import LossValue
from toolkit.runtime.microbatches import Batch, BatchReader, Share, StepResult, step_result
from toolkit.runtime.process_group.processes import Processes
from toolkit.runtime.process_group.shared_status import Process, records
from toolkit.runtime.process_group.watch import JobFailedError
from toolkit.runtime.state import join_states, merged
from toolkit.runtime.step_options import PLAIN, Loss, StepOptions
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler, Weights
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.runtime.meters.measurements import Measurements

_AHEAD = 2  # training steps whose data are sent before they can begin
_MOST_LOST = 3  # ranks lost in one stretch that end the training
_GONE = "the ranks no longer have this training, since they ended or train another: load a state"


class Controller:
    """Ranks that train under the control of this process.

    A training, in a script or a notebook's cell::

        with Controller(ranks=4) as controller:
            for result in controller.train(stages, schedule, optimizer, loss, batches):
                print(result.step, result.loss)
            model = controller.module()

    The ranks start with the first training and are used by the next ones. A failure ends them, as
    does a training that is not exhausted, after Ctrl-C or ``break``; the next one starts new ones.

    Args:
        ranks: number of processes.
        hosts: addresses of their machines, nodes of a running Ray cluster; none: this machine.
        backend, timeout, interface: as of :func:`toolkit.runtime.join`.

    Raises:
        UserError: an argument is invalid.
    """

    def __init__(
        self,
        ranks: int,
        *,
        hosts: Sequence[str] = (),
        backend: str = "auto",
        timeout: float = 120.0,
        interface: str | None = None,
    ) -> None:
        self.processes = Processes(ranks, timeout, hosts)
        self.reach = {"backend": backend, "timeout": timeout, "interface": interface}
        self.runtime: Controlled | None = None  # that of the latest training

    def train(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        batches: Iterable[Batch],
        n_steps: int | None = None,
        **options: Any,
    ) -> Iterator[StepResult]:
        """Begin to train ``stages``; yield the result of each training step, of all ranks together.

        Exhaust it. A pause of the caller between two results counts as a rank's: it has to be
        shorter than ``timeout``.

        Args:
            stages: the model, partitioned.
            schedule: a schedule of as many stages, and of as many ranks as the controller has.
            optimizer: function from the list of a stage's parameters to its optimizer.
            loss: mean loss of a micro-batch, from what the model returns, and targets; or its sum
                and count, see :class:`~toolkit.runtime.base.Runtime`.
            batches: global batches ``(inputs, targets)``, all of one size.
            n_steps: number of batches to take; needed if ``batches`` has no length.
            **options: further arguments of :class:`Controlled`.

        Raises:
            UserError: the arguments do not fit together, or cannot be pickled.
            RankError: a rank raised an exception; the message names the rank and its instruction.
            JobFailedError: a rank died or stalled.
        """
        runtime = Controlled(stages, schedule, optimizer, loss, controller=self, **options)
        return runtime.run(batches, n_steps)

    def module(self) -> nn.Module:
        """Return the model of the latest training, with its newest weights."""
        return self._trained().module()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of all state of the latest training except the position in the data."""
        return self._trained().state_dict()

    def measurements(self) -> Measurements:
        """Return what the ranks measured in the latest training, made with ``record=STEPS``."""
        return self._trained().measurements()

    def _trained(self) -> Controlled:
        if self.runtime is None:
            raise UserError("the controller has trained nothing yet: call train()")
        return self.runtime

    def status(self) -> list[dict[str, Any]]:
        """Return a row a rank: its number, its process, whether that runs, and where it is now."""
        processes = self.processes.process_ids
        status_of_rank = (
            records(self.processes.store, len(processes)) if self.processes.store else {}
        )
        return [
            {
                "rank": rank,
                "process": process,
                "alive": rank in self.processes.alive
                and (self.processes.elsewhere or not Process(process).gone),
                "at": status_of_rank[rank].position if rank in status_of_rank else "start",
            }
            for rank, process in sorted(processes.items())
        ]

    def _repr_html_(self) -> str:
        names = ("rank", "process", "alive", "at")
        cells = [[html.escape(str(row[name])) for name in names] for row in self.status()]
        lines = [f"<tr><td>{'</td><td>'.join(row)}</td></tr>" for row in cells]
        return f"<table><tr><th>{'</th><th>'.join(names)}</th></tr>{''.join(lines)}</table>"

    def close(self) -> None:
        """End all processes."""
        self.processes.close()

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Recovery:
    """A lost rank, and what it cost.

    Attributes:
        message: which rank was lost, and where.
        step: training steps that were done.
        restart: step from which training continued.
        seconds: from the failure's report until all ranks had the state again.
    """

    message: str
    step: int
    restart: int
    seconds: float


_shared: Controller | None = None


def shared(ranks: int, **reach: Any) -> Controller:
    """Return this process's own controller, whose ranks one run uses after another."""
    global _shared
    if _shared is None or (_shared.processes.n_ranks, _shared.reach) != (ranks, reach):
        if _shared is not None:
            _shared.close()
        _shared = Controller(ranks, **reach)
    return _shared


class Controlled(Runtime):
    """Trains stages by a schedule on the ranks of a controller, as :class:`Distributed` does.

    To its caller it is one process with all micro-batches. Results have the losses of all of them,
    and no outputs, which stay on their ranks.

    Args:
        stages, schedule, optimizer, loss, lr_scheduler, seed, options: as in ``Runtime``. The
            model is trained where its copies are, and gets the weights by :meth:`module`.
        controller: whose ranks train; by default that of this process, which it then makes.
        backend, timeout, interface: of that, as of :class:`Controller`.
        keep_every: training steps after which all updates are completed and this process keeps a
            copy of all state. If a rank is lost, all start again from there, and repeat the steps
            since on the same data: at most so many, with the same results. None: a lost rank ends
            the training.
        **on_ranks: further arguments of ``Distributed``, such as ``record``.

    Attributes:
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
        lr_scheduler: MakeScheduler | None = None,
        seed: int = 0,
        options: StepOptions = PLAIN,
        controller: Controller | None = None,
        backend: str = "auto",
        timeout: float = 120.0,
        interface: str | None = None,
        keep_every: int | None = None,
        **on_ranks: Any,
    ) -> None:
        runtime_options: dict[str, Any] = {
            "lr_scheduler": lr_scheduler,
            "seed": seed,
            "options": options,
        }
        super().__init__(stages, schedule, optimizer, loss, **runtime_options)
        if controller is None:
            reach = {"backend": backend, "timeout": timeout, "interface": interface}
            controller = shared(schedule.n_ranks, **reach)
        self._processes = controller.processes
        if self._processes.n_ranks != schedule.n_ranks:
            raise UserError(
                f"the schedule has {schedule.n_ranks} ranks and the controller"
                f" {self._processes.n_ranks}: use Controller(ranks={schedule.n_ranks})"
            )
        on_cpu = self._device is not None and self._device.type == "cpu"
        reach = controller.reach | {"device": "cpu" if on_cpu else "auto"}
        self._device = None  # batches are cut where they are
        self._given = reach, runtime_options | on_ranks
        self._controller = controller
        self._measures = False
        self._keep_every = None if keep_every is None else whole(keep_every, "keep_every", 1)
        self.kept: dict[str, Any] | None = None
        self.recoveries: list[Recovery] = []
        self._begin()

    def _begin(self) -> None:
        """Have the ranks make what they train."""
        training = self.stages, self.schedule_plan, self.optimizer, self.loss
        self._processes.call(controlled_rank.build, training, *self._given)
        self._controller.runtime = self
        self._start = self._processes.starts

    def _holding(self) -> bool:
        """Whether the ranks have what this runtime trains."""
        ready = self._controller.runtime is self and self._processes.ready()
        return ready and self._processes.starts == self._start

    def _ask(self, name: str, *args: Any) -> list[Any]:
        """Call a method of every rank's ``Distributed``; return the results, ``[rank]``."""
        self._await_ranks()
        return self._processes.call(controlled_rank.ask, name, *args)

    def _await_ranks(self) -> None:
        """Return once the ranks have this training: from the kept state, if they lost it."""
        if not self._holding():
            if self.kept is None or self.kept["steps_done"] != self.steps_done:
                raise UserError(_GONE)
            self._restore(self.kept, "the ranks ended, or trained another")

    def _restore(self, state: Mapping[str, Any], why: str = "") -> None:
        """Have ranks that lack this training continue from ``state``."""
        start, restart = time.perf_counter(), state["steps_done"]
        self._begin()
        self._processes.call(controlled_rank.ask, "load_state_dict", state)
        if why:
            print(f"{why}; training continues from step {restart}", file=sys.stderr)
            seconds = time.perf_counter() - start
            self.recoveries.append(Recovery(why, self.steps_done, restart, seconds))

    def _steps(self, source: BatchReader) -> Steps:
        raise AssertionError("the ranks follow the plan")

    def _phases(self, source: BatchReader) -> Steps:
        """Train in stretches of ``keep_every`` steps; repeat one in which a rank is lost."""
        assert source.n_steps is not None  # known, since steps overlap
        end, every = self.steps_done + source.n_steps, self._keep_every
        # The first stretch, too, needs a state to repeat it from.
        if every and (self.kept is None or self.kept["steps_done"] != self.steps_done):
            self.kept = self._state()
        while self.steps_done < end:
            first, shares, n_lost = self.steps_done, list[Share](), 0
            length = min(end - first, every or end)
            self._await_ranks()
            while True:
                try:
                    yield from self._stretch(source, shares, first, length)
                    break
                except JobFailedError as error:
                    n_lost += 1
                    if self.kept is None or n_lost == _MOST_LOST:
                        raise
                    self._restore(self.kept, str(error))
            self.schedule = self.schedule_plan.at(self.steps_done)

    def _stretch(self, source: BatchReader, shares: list[Share], first: int, length: int) -> Steps:
        """Send the ranks their data, a few steps ahead, and collect their losses.

        ``shares`` has the batches from step ``first`` on that a lost rank may have to read again.
        Only the steps that are not done yet yield a result.
        """
        ahead = _AHEAD + max(
            self.schedule_plan.at(step).timing.steps_under_way
            for step in (first, *self.schedule_plan.changes(range(first, first + length)))
        )
        self._processes.begin(controlled_rank.train, length, self._keep_every is not None)
        # New ranks do not have this training: the caller restores it.
        if self._processes.starts != self._start:
            raise JobFailedError("a rank died while it waited")
        losses_of_step: defaultdict[int, dict[int, LossValue]] = defaultdict(dict)
        next_step, n_sent = first, 0
        with contextlib.closing(self._processes.reports()) as reports:
            while True:
                while n_sent < min(length, next_step - first + ahead):
                    if n_sent == len(shares):
                        shares.append(next(source))
                    self._send(shares[n_sent], first + n_sent)
                    if self._keep_every is None:
                        shares[n_sent] = None  # nothing is repeated: free its memory
                    n_sent += 1
                try:
                    _, (step, losses) = next(reports)
                except StopIteration:
                    break
                losses_of_step[step] |= losses
                while len(losses_of_step[next_step]) == self.schedule.n_microbatches:
                    losses = losses_of_step.pop(next_step)
                    next_step += 1
                    # A repeated step yields no second result.
                    if next_step > self.steps_done:
                        self.steps_done = next_step
                        yield step_result(next_step - 1, losses, torch.empty(0))
        measured, rank_states = zip(*self._processes.results(), strict=True)
        self._measures = any(measured)
        if self._keep_every is not None:
            self.kept = join_states(rank_states)

    def _send(self, share: Share, step: int) -> None:
        """Send each rank the micro-batches of ``share`` that it reads at ``step``."""
        assert share is not None
        *inputs, targets = (
            tensor.chunk(self.schedule.n_microbatches) for tensor in (*share[0], share[1])
        )
        receivers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(self._processes.n_ranks):
            receivers[tuple(microbatches_read(self.schedule_plan, rank, step))].append(rank)
        for microbatches, ranks in receivers.items():
            if microbatches:
                *rank_inputs, rank_targets = (
                    _packed([tensor[microbatch] for microbatch in microbatches])
                    for tensor in (*inputs, targets)
                )
                self._processes.send((tuple(rank_inputs), rank_targets), ranks)

    def _module(self) -> nn.Module:
        state, *_ = self._ask("module")
        self.stages.model.load_state_dict(state)
        return self.stages.model

    def _local_state(self) -> dict[str, Any]:
        return reduce(merged, self._ask("local_state"))

    def _averages(self) -> Weights:
        return self._ask("averages")[0]

    def skipped(self) -> list[int]:
        """Return each stage's number of updates skipped as not finite."""
        self._check_ended()
        return self._ask("skipped")[0]

    @property
    def measures(self) -> bool:
        """Whether training steps have been measured."""
        return self._measures

    def measurements(self) -> Measurements:
        """Return what all ranks measured in the recorded steps."""
        self._check_ended()
        return self._ask("measurements")[0]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``; see :meth:`Runtime.load_state_dict`."""
        if self._holding():
            self._processes.call(controlled_rank.ask, "load_state_dict", state)
        else:
            self._restore(state)
        self._unfinished, self.steps_done = None, state["steps_done"]
        self.schedule = self.schedule_plan.at(self.steps_done)

    def set_schedule(self, schedule_plan: Schedule) -> None:
        """Train by ``schedule_plan`` from the next step on; see :meth:`Runtime.set_schedule`."""
        self._check_ended()
        self.check_schedule_plan(schedule_plan)
        self._ask("set_schedule", schedule_plan)
        self.schedule_plan, self.schedule = schedule_plan, schedule_plan.at(self.steps_done)

    def _load(self, state: Mapping[str, Any]) -> None:
        raise AssertionError("the ranks load states")


def _packed(chunks: list[Tensor]) -> Any:
    """Join ``chunks`` into one array: arrays pickle faster, and a view would pickle its whole."""
    tensor = torch.cat([chunk.cpu() for chunk in chunks])
    try:
        return tensor.numpy()
    except TypeError:  # a type that numpy lacks
        return tensor

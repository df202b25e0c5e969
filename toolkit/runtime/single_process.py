"""Every micro-batch of every rank in one process."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from toolkit.model import Stages
from toolkit.runtime.checks import check_fit, divisible, moved, next_batch, scalar, take
from toolkit.runtime.diagnostics import StageDelay, diagnose
from toolkit.runtime.grouped import Grouped, Loss
from toolkit.runtime.interface import Batch
from toolkit.runtime.recipe import PLAIN, Recipe
from toolkit.runtime.result import StepResult
from toolkit.runtime.scheduled import Scheduled
from toolkit.runtime.stage import StageWorker, Values
from toolkit.runtime.state import check_state, joined, load_model, loaded, part_of
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler, Weights, join_averages
from toolkit.schedule import Schedule

ORDERS = ("grouped", "scheduled")
_WINDOW = 64  # training steps lowered at once in order "scheduled"


class SingleProcess:
    """Trains stages by a schedule, all of it in this process.

    The trajectory is a function of the schedule's staleness, of whether it predicts, of the seed,
    the order of the data and the hyper-parameters, and of nothing else::

        theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
        theta_hat^j_{m,t} = theta^j_{t - staleness[j][m]}

    or what that lets expect of theta^j_t (see ``predict`` of :class:`toolkit.schedule.Schedule`).

    Args:
        stages: the model, partitioned; its parameters are trained in place.
        schedule: for as many stages.
        optimizer: makes the optimizer of a stage from the list of its parameters; one that wants
            their names, too, is marked by :func:`toolkit.runtime.by_name`.
        loss: mean loss of a micro-batch, from outputs and targets.
        order: ``"grouped"``, nearly as fast as plain training; or ``"scheduled"``, which runs the
            schedule's program slot by slot and has the schedule's memory.
        lr_scheduler: makes the learning-rate schedule of a stage from its optimizer; it advances
            with each update of the stage.
        seed: of what the model draws at random in training, such as dropout.
        recipe: how stages compute and update.
        diagnostics: training steps between two looks at what the delay does to the gradients,
            in order "grouped" (see :class:`~toolkit.runtime.diagnostics.StageDelay`); 0: none.

    Raises:
        ValueError: stages, schedule and recipe do not fit, or an unknown order.

    Source: the update rules (DP), (CDP-v1) and (CDP-v2) of arXiv 2403.08837, section 3.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        order: str = "grouped",
        *,
        lr_scheduler: MakeScheduler | None = None,
        seed: int = 0,
        recipe: Recipe = PLAIN,
        diagnostics: int = 0,
    ) -> None:
        if order not in ORDERS:
            raise ValueError(f"unknown order {order!r}: choose one of {', '.join(ORDERS)}")
        if diagnostics < 0 or (diagnostics and order != "grouped"):
            raise ValueError(
                "diagnostics is a number of steps, 0 for none, and takes order=grouped: got"
                f" {diagnostics} with order={order}"
            )
        check_fit(stages, schedule, optimizer, recipe)
        recipe.check(schedule, whole_step=order == "grouped")
        self.stages = stages
        self.schedule = schedule
        self.order = order
        self.steps_done = 0
        self._workers = [
            StageWorker(stage, j, optimizer, lr_scheduler, seed, recipe)
            for j, stage in enumerate(stages)
        ]
        self._versions: list[dict[int, Weights]] = [{0: w.newest()} for w in self._workers]
        computed = recipe.computed(scalar(loss))
        self._diagnostics = diagnostics
        self._grouped = Grouped(
            self._workers, schedule, computed, recipe, keep_last=diagnostics > 0
        )
        self._scheduled = Scheduled(self._workers, schedule, computed)
        devices = {parameter.device for parameter in stages.model.parameters()}
        self._device = devices.pop() if len(devices) == 1 else None

    def module(self) -> nn.Module:
        """The whole model; it holds the newest weights."""
        return self.stages.model

    def averages(self) -> Weights:
        """The average of each trained parameter, by its name; empty if none is kept."""
        return join_averages(self._workers)

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        rates = (worker.learning_rate for worker in self._workers)
        return [rate for rate in rates if rate is not None]

    @property
    def world(self) -> None:
        """There is one process."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def n_ranks(self) -> int:
        return 1

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values``: themselves."""
        return values

    def step(self, inputs: Tensor | Values, targets: Tensor) -> StepResult:
        """One training step, to its last update.

        Args:
            inputs: ``[n_microbatches * b, ...]``, or a tuple of such tensors, on any device;
                micro-batch m is slice m.
            targets: ``[n_microbatches * b, ...]``.

        Raises:
            ValueError: the batch cannot be divided into micro-batches of equal size.
        """
        (result,) = self.run([(inputs, targets)])
        return result

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each batch; yield each step's result. Exhaust it: only then are all updates in.

        In order "scheduled" consecutive steps overlap as the schedule has them, so a result can
        precede its step's last update, and the number of batches must be known.

        Args:
            batches: ``(inputs, targets)`` as in :meth:`step`.
            n_steps: how many of them to take; all unless given.

        Raises:
            ValueError: a batch cannot be divided, there are fewer than n_steps, or their number is
                not known.
        """
        if self.order == "grouped":
            yield from self._run_grouped(batches, n_steps)
            return
        if n_steps is None:
            if not isinstance(batches, Sized):
                raise ValueError('order="scheduled" looks ahead: give n_steps to run()')
            n_steps = len(batches)
        source, begin = iter(batches), self.steps_done
        for done in range(0, n_steps, _WINDOW):
            window = min(_WINDOW, n_steps - done)
            program = self.schedule.lower(window, self.steps_done)
            yield from self._scheduled.run(
                program,
                self._versions,
                lambda step: self._taken(next_batch(source, step - begin)),
            )
            self.steps_done += window

    @property
    def own(self) -> range:
        """The stages that are updated here: all."""
        return range(len(self.stages))

    def part(self) -> dict[str, Any]:
        """What this process adds to :meth:`state_dict`: all, as it is until the next step."""
        versions = dict(enumerate(self._versions))
        return part_of(self.steps_done, self.stages, self._workers, versions, self.own, leads=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, but for the data: a copy."""
        return joined([copy.deepcopy(self.part())])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, by whichever runtime.

        Raises:
            ValueError: the state is of other stages, lacks weights that the schedule reads, or is
                formed otherwise than this runtime's.
        """
        form = self.module().state_dict()
        check_state(state, self.schedule, self._workers, form, self.own)
        load_model(state, self.stages, self._workers, self.own)
        self.steps_done = state["steps_done"]
        for j, worker in enumerate(self._workers):
            self._versions[j] = loaded(state, j, worker)
            worker.load(state["stages"][j])
        self._scheduled.forget_replicas()

    def _taken(self, batch: Batch) -> tuple[Values, Tensor]:
        """A batch that can be divided, on the device of the model if that is one."""
        return moved(*divisible(*batch, self.schedule.n_microbatches), self._device)

    def _run_grouped(self, batches: Iterable[Batch], n_steps: int | None) -> Iterator[StepResult]:
        for batch in take(batches, n_steps):
            inputs, targets = self._taken(batch)
            self._grouped.recipe.begin_step()
            step = self.steps_done
            delays: tuple[StageDelay, ...] = ()
            if self._diagnostics and step % self._diagnostics == 0:
                delays = diagnose(self._grouped, step, self._versions, inputs, targets)
            results = [self._grouped.step(step, self._versions, inputs, targets)]
            self.steps_done += 1
            yield replace(results.pop(), delays=delays)  # kept by whoever takes it, and not here

"""Every micro-batch of every rank in one process."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from toolkit.errors import UserError, check_choice
from toolkit.model import Stages
from toolkit.runtime.base import Runtime, Steps
from toolkit.runtime.checks import scalar
from toolkit.runtime.grouped import Grouped, Loss
from toolkit.runtime.microbatches import BatchReader, StepResult
from toolkit.runtime.scheduled import Scheduled
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.state import load_model, loaded, part_of
from toolkit.runtime.step_options import PLAIN, StepOptions
from toolkit.runtime.updater import MakeOptimizer, MakeScheduler, Weights
from toolkit.schedule import Schedule

ORDERS = ("grouped", "scheduled")


class SingleProcess(Runtime):
    """Trains stages by a schedule, all of it in this process.

    The trajectory is a function of the schedule's staleness, of whether it predicts, of the seed,
    the order of the data and the hyper-parameters, and of nothing else::

        theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
        theta_hat^j_{m,t} = theta^j_{t - staleness[j][m]}

    or that extrapolated to theta^j_t (see ``predict`` of :class:`toolkit.schedule.Schedule`).

    Args:
        stages: the model, partitioned; its parameters are trained in place.
        schedule: a schedule of as many stages.
        optimizer: function from the list of a stage's parameters to its optimizer; one that takes
            their names, too, is marked by :func:`toolkit.runtime.by_name`.
        loss: mean loss of a micro-batch, from outputs and targets.
        order: ``"grouped"``, nearly as fast as plain training; or ``"scheduled"``, which runs the
            schedule's program slot by slot and has the schedule's memory.
        lr_scheduler: function from a stage's optimizer to its learning-rate schedule, which
            advances with each update of the stage.
        seed: seed of the model's random draws in training, such as dropout.
        options: how stages compute and update.
        diagnostics: training steps between two looks at what the delay does to the gradients,
            in order "grouped" (see :class:`~toolkit.runtime.diagnostics.StageDelay`); 0: none.

    Raises:
        UserError: stages, schedule and options do not fit, or an unknown order.

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
        options: StepOptions = PLAIN,
        diagnostics: int = 0,
    ) -> None:
        check_choice("order", order, ORDERS)
        if diagnostics < 0 or (diagnostics and order != "grouped"):
            raise UserError(
                "diagnostics is a number of steps, 0 for none, and takes order=grouped: got"
                f" {diagnostics} with order={order}"
            )
        super().__init__(stages, schedule, optimizer, options)
        options.check(schedule, whole_step=order == "grouped")
        self._overlaps = order == "scheduled"
        self._runners = [
            StageRunner(stage, j, optimizer, lr_scheduler, seed, options)
            for j, stage in enumerate(stages)
        ]
        self._updaters = self._runners
        self._versions: list[dict[int, Weights]] = [
            {0: runner.newest()} for runner in self._runners
        ]
        computed = options.computed(scalar(loss))
        given = self._runners, schedule, computed
        self._make_engine: Callable[[], Grouped | Scheduled] = (
            partial(Grouped, *given, diagnostics)
            if order == "grouped"
            else partial(Scheduled, *given)
        )
        self._engine = self._make_engine()

    distributed = False

    def _module(self) -> nn.Module:
        return self.stages.model

    def _steps(self, source: BatchReader, n_steps: int | None) -> Steps:
        for runner in self._runners:
            runner.take_statistics()  # of a step that ended by an error
        steps = self._engine.run(source, self._versions, self.steps_done, n_steps)
        yield from map(self._count, steps)

    def _part(self) -> dict[str, Any]:
        versions = dict(enumerate(self._versions))
        return part_of(self.steps_done, self.stages, self._runners, versions, self.own, leads=True)

    def _load(self, state: Mapping[str, Any]) -> None:
        load_model(state, self.stages, self._runners, self.own)
        for j, runner in enumerate(self._runners):
            self._versions[j] = loaded(state, j, runner)
            runner.load(state["stages"][j])
        self._engine = self._make_engine()  # without what it keeps of the weights before

    def _count(self, result: StepResult) -> StepResult:
        self.steps_done = result.step + 1
        return result

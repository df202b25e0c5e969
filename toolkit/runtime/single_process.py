"""Runtime of a schedule in one process."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import nn

from toolkit.errors import UserError, check_choice
from toolkit.model import Stages
from toolkit.runtime.base import Common, Runtime, Steps
from toolkit.runtime.grouped import Grouped
from toolkit.runtime.microbatches import BatchReader
from toolkit.runtime.scheduled import Scheduled
from toolkit.runtime.state import load_model, loaded, part_of
from toolkit.runtime.step_options import Loss
from toolkit.runtime.updater import MakeOptimizer, Weights
from toolkit.schedule import Schedule

ORDERS = ("grouped", "scheduled")


class SingleProcess(Runtime):
    """Trains stages by a schedule in this process.

    The trajectory depends only on the schedule's staleness and prediction, the seed, the order of
    the data and the hyper-parameters::

        theta^j_{t+1} = optimizer(theta^j_t, 1/M sum_m grad_j f_m(theta_hat_{m,t}))
        theta_hat^j_{m,t} = theta^j_{t - staleness[j][m]}

    or that extrapolated to theta^j_t (see ``predict`` of :class:`toolkit.schedule.Schedule`).

    Args:
        stages, schedule, optimizer, loss, lr_scheduler, seed, options: as in ``Runtime``; the
            model's parameters are trained in place.
        order: ``"grouped"``, nearly as fast as plain training; or ``"scheduled"``, which runs the
            schedule's program slot by slot and has the schedule's memory.
        diagnostics: training steps between two measurements of the delay's effect on gradients,
            in order "grouped" (see :class:`~toolkit.runtime.microbatches.StageDelay`); 0: none.

    Raises:
        UserError: stages, schedule and options do not fit, or the order is unknown.

    Source: the update rules (DP), (CDP-v1) and (CDP-v2) of arXiv 2403.08837, section 3.
    """

    distributed = False

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        order: str = "grouped",
        *,
        diagnostics: int = 0,
        **common: Unpack[Common],
    ) -> None:
        check_choice("order", order, ORDERS)
        if diagnostics < 0 or (diagnostics and order != "grouped"):
            raise UserError(
                f"diagnostics: got {diagnostics} with order={order}; expected 0 or more steps with"
                " order=grouped"
            )
        self._whole_step = order == "grouped"
        self._overlaps = order == "scheduled"
        self._diagnostics = diagnostics
        super().__init__(stages, schedule, optimizer, loss, **common)
        self._updaters = self._runners = self._make_runners()
        self._versions: list[dict[int, Weights]] = [{0: r.newest()} for r in self._runners]
        self._engine = self._make_engine()

    def _make_engine(self) -> Grouped | Scheduled:
        if self._overlaps:
            return Scheduled(self._runners, self.schedule, self._loss)
        return Grouped(self._runners, self.schedule, self._loss, self._diagnostics)

    def _module(self) -> nn.Module:
        return self.stages.model

    def _steps(self, source: BatchReader) -> Steps:
        for runner in self._runners:
            runner.take_statistics()  # left by a step that raised
        for result in self._engine.run(source, self._versions, self.steps_done):
            self.steps_done = result.step + 1
            yield result
            del result  # or its outputs would live through the next step

    def _part(self) -> dict[str, Any]:
        versions = dict(enumerate(self._versions))
        return part_of(self.steps_done, self.stages, self._runners, versions, self.own, leads=True)

    def _load(self, state: Mapping[str, Any]) -> None:
        load_model(state, self.stages, self._runners, self.own)
        for j, runner in enumerate(self._runners):
            self._versions[j] = loaded(state, j, runner)
            runner.load(state["stages"][j])
        # A new one: the scheduled engine keeps replicas of the weights before.
        self._engine = self._make_engine()

"""Switch to another schedule during training, by measured costs and by the loss.

At a look the pipeline has drained: rank 0 simulates each candidate with the costs that ranks
measured meanwhile, and its choice is that of all. A look costs the time to fill the pipeline again,
a message around the ranks, and the simulation. So looks become rare while nothing changes; and
where a rank's steps take another time than before, all ranks end their run for one.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import inf, isclose, nan
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor

from toolkit.cost import Costs, Hardware, simulate
from toolkit.errors import UserError
from toolkit.options import SwitchOptions
from toolkit.runtime.base import Runtime
from toolkit.runtime.microbatches import Batch, StepResult
from toolkit.schedule import Program, Schedule, switched
from toolkit.schedule.steady_state import steps_to_time

_TIMED = 4  # steps after a look whose ops are timed
_FILLING = 2  # steps in which a pipeline fills, whose time is not compared
_COMPARED = 3  # steps whose median time is compared with that of the first ones
_DRIFT = 0.2  # share by which it differs if something has changed
_RARER = 4  # factor by which steps to the next look grow, at each look in a row
_RAREST = _RARER**3
_NEAR = 0.1  # costs that have moved by less are not simulated again
_TIE = 0.01  # share of a step's time within which the freshest candidate counts as the fastest

COSTS, LOSS_ROSE, LOSS_CALM = "costs", "loss rose", "loss calm"
"""The reasons of changes."""


@dataclass(frozen=True)
class Look:
    """A decision about the schedule, the same on all ranks.

    Attributes:
        step: training steps done; the schedule is that of the steps from there on.
        schedule: name of the candidate.
        reason: why the schedule changes; empty if it does not.
        seconds: of a training step since the look before, measured.
        loss: mean of those steps.
        predicted: seconds of a step by each candidate; empty if costs are unknown.
        bandwidth, latency: of links, in bytes per second and seconds; NaN if unknown.
    """

    step: int
    schedule: str
    reason: str = ""
    seconds: float = nan
    loss: float = nan
    predicted: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = nan
    latency: float = nan


def choose(
    schedules: Sequence[Schedule],
    seconds: Sequence[float],
    present: int,
    threshold: float = 0.05,
    staleness_price: float = 0.0,
) -> int:
    """Return the position of the schedule to continue with.

    Of those within 1 % of the fastest it is the freshest, if that gains more than ``threshold`` or
    is fresher than the present one.

    Args:
        schedules: the candidates.
        seconds: predicted, of a step by each.
        present: position of the present one.
        threshold: share of the present one's time.
        staleness_price: share of a step's time that is added for each step of mean staleness.
    """
    staleness = [schedule.mean_staleness for schedule in schedules]
    prices = [
        step_seconds * (1 + staleness_price * delay)
        for step_seconds, delay in zip(seconds, staleness, strict=True)
    ]
    tied = [index for index, price in enumerate(prices) if price <= (1 + _TIE) * min(prices)]
    best = min(tied, key=lambda index: (staleness[index], prices[index]))
    gains = prices[best] < (1 - threshold) * prices[present]
    return best if gains or staleness[best] < staleness[present] else present


class Switching:
    """Chooses, at each look, the schedule by which a runtime continues.

    On costs, if the runtime knows them: the candidate that is fastest by :func:`choose`. On the
    loss, with ``options.loss_factor``: the freshest candidate while the loss is above that multiple
    of the lowest so far, until it is no higher than at the look before it rose.

    Args:
        runtime: the runtime, whose schedule is a candidate too.
        candidates: schedules by name, of equal stages, micro-batches and ranks.
        options: when to look, and what a change has to gain; its ``candidates`` are not used.

    Attributes:
        looks: all decisions so far.
        present: name of the schedule of the next step.
        on_look: function that is called with each decision.

    Raises:
        UserError: the runtime cannot go over to a candidate, or has nothing to decide by.
    """

    def __init__(
        self,
        runtime: Runtime,
        candidates: Mapping[str, Schedule],
        options: SwitchOptions | None = None,
    ) -> None:
        self.runtime, self.options = runtime, options or SwitchOptions()
        if not runtime.knows_costs and self.options.loss_factor is None:
            raise UserError(
                f"switch: {type(runtime).__name__} does not know its costs: give"
                " switch.loss_factor, or use runtime=distributed"
            )
        for schedule in candidates.values():
            runtime.check_schedule_plan(
                switched(runtime.schedule_plan, runtime.steps_done + 1, schedule)
            )
        self.candidates, final_schedule = dict(candidates), runtime.schedule_plan.final
        names = [name for name, schedule in candidates.items() if schedule == final_schedule]
        self.present = names[0] if names else final_schedule.name
        self.candidates.setdefault(self.present, final_schedule)
        self._first = self.present
        self.looks: list[Look] = []
        self.on_look: Callable[[Look], None] = lambda look: None
        self._window = [0.0] * 3  # steps since the last look, their seconds, and sum of losses
        self._fresh = min(self.candidates, key=lambda name: self.candidates[name].mean_staleness)
        self._lowest = inf  # the lowest loss of all looks, and that of the last look
        self._last = inf
        self._calm: float | None = None  # the loss at which a fall-back ends
        self._before = self.present  # the schedule before a fall-back
        self._programs: dict[str, Program] = {}
        self._known: tuple[list[float], dict[str, float]] = [], {}  # costs, and predictions by them
        runtime.time_costs(_TIMED)
        if self._by_costs_alone:
            runtime.end_early(self.options.every, _drifts)

    @property
    def _by_costs_alone(self) -> bool:
        return self.runtime.knows_costs and self.options.loss_factor is None

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train as :meth:`Runtime.run` does, in parts, with a look after each.

        Args:
            batches: ``(inputs, targets)``, as in :meth:`Runtime.run`.
            n_steps: number of batches to take; all by default.

        Raises:
            UserError: the number of batches is unknown.
        """
        if n_steps is None and not isinstance(batches, Sized):
            raise UserError("run() ends parts before a look: give n_steps")
        steps_left, batches = (
            n_steps if n_steps is not None else len(cast(Sized, batches)),
            iter(batches),
        )
        while steps_left:
            start, losses = time.perf_counter(), []
            for result in self.runtime.run(batches, min(steps_left, self.steps_to_look())):
                losses.append(result.loss_sum())
                yield result
                del result
            seconds = time.perf_counter() - start
            self.trained(len(losses), seconds, mean_loss(self.runtime, losses))
            steps_left -= len(losses)

    def steps_to_look(self) -> int:
        """Return the training steps until the next look, unless a run ends early before.

        On costs alone they grow with each look since the last change.
        """
        steps_done, every = self.runtime.steps_done, self.options.every
        last_look = self.looks[-1].step if self.looks else 0
        changes = [index for index, look in enumerate(self.looks) if look.reason]
        in_row = len(self.looks) - (changes[-1] if changes else 0)
        span = min(_RARER**in_row, _RAREST) if self._by_costs_alone else 1
        return max(
            every - steps_done % every, last_look - last_look % every + span * every - steps_done
        )

    def trained(self, n_steps: int, seconds: float, loss: float) -> None:
        """Count steps that have run; look, if it is time to. Every rank calls it.

        Args:
            n_steps: their number, at most :meth:`steps_to_look` before them.
            seconds: that they took together.
            loss: their mean, the same on every rank.
        """
        sums = zip(self._window, (n_steps, seconds, n_steps * loss), strict=True)
        self._window = n_timed, seconds, loss = [a + b for a, b in sums]
        if self.runtime.steps_done % self.options.every == 0:
            self._window = [0.0] * 3
            self.look(seconds / n_timed, loss / n_timed)

    def look(self, seconds: float, loss: float) -> Look:
        """Choose the schedule of the next steps, and go over to it. Every rank calls it.

        Args:
            seconds: of a training step since the last look.
            loss: mean of those steps, the same on every rank.
        """
        runtime, step = self.runtime, self.runtime.steps_done
        name, reason = self._by_loss(loss)
        decision = Look(step, name, reason, seconds, loss)
        if runtime.knows_costs:
            costs, hardware = runtime.costs()
            if runtime.rank == 0:
                decision = self._by_costs(decision, costs, hardware)
            if runtime.world is not None:
                decision = runtime.world.gather(decision)[0]
        self._take(decision)
        if decision.reason:
            runtime.switch(self.candidates[decision.schedule])
        runtime.time_costs(_TIMED)
        self.on_look(decision)
        return decision

    def state(self) -> dict[str, Any]:
        """Return the decisions so far, as plain values."""
        return {"looks": [asdict(look) for look in self.looks], "window": self._window}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after :meth:`state` of an earlier run, whose own state the runtime loads next.

        Raises:
            UserError: the earlier run went over to a schedule that is no candidate.
        """
        schedule_plan, self._window = self.runtime.schedule_plan, state["window"]
        for look in (Look(**values) for values in state["looks"]):
            if look.schedule not in self.candidates:
                raise UserError(
                    f"the run has gone over to {look.schedule}: give that as a candidate, too"
                )
            self._by_loss(look.loss)
            self._take(look)
            if look.reason:
                schedule_plan = switched(schedule_plan, look.step, self.candidates[look.schedule])
        self.runtime.set_schedule(schedule_plan)

    def parts(self) -> list[tuple[str, int]]:
        """Return the schedules by which the run has trained, and the steps of each."""
        starts = [
            (0, self._first),
            *((look.step, look.schedule) for look in self.looks if look.reason),
        ]
        ends = [*(step for step, _ in starts[1:]), self.runtime.steps_done]
        return [(name, end - begin) for (begin, name), end in zip(starts, ends, strict=True)]

    def _take(self, look: Look) -> None:
        self.looks.append(look)
        self.present = look.schedule

    def _by_loss(self, loss: float) -> tuple[str, str]:
        """Return the schedule that the loss asks for, and the reason if it is another."""
        factor, last = self.options.loss_factor or inf, self._last
        self._lowest, self._last = min(self._lowest, loss), loss
        if self._calm is None and loss > factor * self._lowest:
            self._calm = last
            self._before = self.present
            return self._fresh, LOSS_ROSE if self.present != self._fresh else ""
        if self._calm is not None and loss <= self._calm:
            self._calm = None
            return self._before, LOSS_CALM if self.present != self._before else ""
        return self.present, ""

    def _by_costs(self, look: Look, costs: Costs, hardware: Hardware) -> Look:
        """Return ``look`` with predictions, and the candidate that is fastest by them."""
        predicted = self._predict(costs, hardware)
        name, reason = look.schedule, look.reason
        if not reason and self._calm is None:
            names = [*self.candidates]
            schedules, seconds = [*self.candidates.values()], [predicted[n] for n in names]
            choice_options = self.options.threshold, self.options.staleness_price
            name = names[choose(schedules, seconds, names.index(name), *choice_options)]
            reason = COSTS if name != look.schedule else ""
        links = hardware.link_bandwidth, hardware.link_latency
        return Look(look.step, name, reason, look.seconds, look.loss, predicted, *links)

    def _predict(self, costs: Costs, hardware: Hardware) -> dict[str, float]:
        """Return the simulated seconds of a step by each candidate."""
        compute = sum(map(sum, (cost.seconds(hardware) for cost in costs)))
        present_costs = [hardware.link_bandwidth, compute / min(hardware.speeds)]
        previous_costs, predicted = self._known
        if previous_costs and all(
            isclose(present, previous, rel_tol=_NEAR)
            for present, previous in zip(present_costs, previous_costs, strict=True)
        ):
            return predicted
        for name, schedule in self.candidates.items():
            if name not in self._programs:
                self._programs[name] = schedule.lower(steps_to_time(schedule)).verify()
        predicted = {
            name: simulate(program, costs, hardware).step_time
            for name, program in self._programs.items()
        }
        self._known = present_costs, predicted
        return predicted


def _drifts(moments: list[float]) -> bool:
    """Whether the last steps of a run take another time than the first ones."""
    seconds = [end - begin for begin, end in pairwise(moments)][_FILLING - 1 :]
    first_seconds, last_seconds = seconds[: 2 * _COMPARED], seconds[-_COMPARED:]
    return len(seconds) > _COMPARED and not isclose(
        median(first_seconds), median(last_seconds), rel_tol=_DRIFT
    )


def mean_loss(runtime: Runtime, losses: Sequence[Tensor]) -> float:
    """Return the mean of all ranks' ``losses``, each a sum and a count. Every rank calls it."""
    total, count = runtime.total(torch.stack([*losses]).sum(0).cpu()).tolist()
    return float(total / count)

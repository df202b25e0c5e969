"""Switch to another schedule during training, by measured costs and by the loss.

At a decision the pipeline has drained. Rank 0 simulates each candidate with the costs that ranks
measured meanwhile, and all ranks follow its choice. A decision costs the time to fill the pipeline
again, a message around the ranks, and the simulation. So decisions are rarer while nothing changes.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass, field, replace
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from toolkit.cost import Costs, Hardware, simulate
from toolkit.errors import UserError
from toolkit.options import SwitchOptions
from toolkit.runtime.base import Runtime
from toolkit.runtime.microbatches import GlobalBatch, StepResult
from toolkit.schedule import Program, Schedule, switched
from toolkit.schedule.steady_state import steps_to_time

_TIMED_STEPS = 4  # after a decision, for the costs of the next one
# Factor on the steps to the next decision on costs after one that changed nothing.
_RARER = 4
# Share of a step's time within which the freshest candidate counts as the fastest.
_TIE = 0.01

COSTS = "costs"
LOSS_ROSE = "loss rose"
LOSS_CALM = "loss calm"


@dataclass(frozen=True)
class SwitchDecision:
    """A decision about the schedule, the same on all ranks.

    Attributes:
        step: training steps done; the schedule is that of the steps from there on.
        schedule: name of the candidate.
        reason: why the schedule changes, such as :data:`COSTS`; empty if it does not.
        seconds: of a training step since the decision before, measured.
        loss: mean of those steps.
        predicted: seconds of a step by each candidate; empty if costs are unknown.
        bandwidth: of links, in bytes per second; NaN if unknown.
        latency: of links, in seconds; NaN if unknown.
    """

    step: int
    schedule: str
    reason: str = ""
    seconds: float = nan
    loss: float = nan
    predicted: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float = nan
    latency: float = nan


def choose_schedule(
    schedules: Sequence[Schedule],
    seconds: Sequence[float],
    current: int,
    threshold: float = 0.05,
    staleness_price: float = 0.0,
) -> int:
    """Return the position of the schedule to continue with.

    Of those within 1 % of the fastest it is the freshest, if that gains more than ``threshold`` or
    is fresher than the current one.

    Args:
        schedules: the candidates.
        seconds: predicted, of a step by each.
        current: position of the current one.
        threshold: share of the current one's time.
        staleness_price: share of a step's time that is added for each step of mean staleness.
    """
    staleness = [schedule.mean_staleness for schedule in schedules]
    prices = []
    for step_seconds, delay in zip(seconds, staleness, strict=True):
        prices.append(step_seconds * (1 + staleness_price * delay))
    # Simulated times differ by less than their error, so within 1 % staleness decides.
    tied = [
        index for index, price in enumerate(prices) if price <= (1 + _TIE) * min(prices)
    ]
    best = min(tied, key=lambda index: (staleness[index], prices[index]))
    gains = prices[best] < (1 - threshold) * prices[current]
    if gains or staleness[best] < staleness[current]:
        return best
    return current


class Switching:
    """Decides from time to time by which schedule a runtime continues.

    On costs, if the runtime knows them: the candidate that is fastest by :func:`choose_schedule`.
    On the loss, with ``options.loss_factor``: the freshest candidate while the loss is above that
    multiple of the lowest so far, until it is no higher than at the decision before it rose.

    Args:
        runtime: the runtime, whose schedule is a candidate too.
        candidates: schedules by name, of equal stages, micro-batches and ranks.
        options: when to decide, and what a change has to gain; its ``candidates`` are not used.

    Attributes:
        decisions: all decisions so far.
        current: name of the schedule of the next step.
        on_decision: function that is called with each decision.

    Raises:
        UserError: the runtime cannot go over to a candidate, or has nothing to decide by.
    """

    def __init__(
        self,
        runtime: Runtime,
        candidates: Mapping[str, Schedule],
        options: SwitchOptions | None = None,
    ) -> None:
        self.runtime = runtime
        self.options = options or SwitchOptions()
        if not runtime.knows_costs and self.options.loss_factor is None:
            raise UserError(
                f"switch: {type(runtime).__name__} does not know its costs: give"
                " switch.loss_factor, or use runtime=distributed"
            )
        for schedule in candidates.values():
            plan = switched(runtime.schedule_plan, runtime.steps_done + 1, schedule)
            runtime.check_schedule_plan(plan)
        final_schedule = runtime.schedule_plan.final
        names = [
            name for name, schedule in candidates.items() if schedule == final_schedule
        ]
        self.current = names[0] if names else final_schedule.name
        self.candidates = dict(candidates)
        self.candidates.setdefault(self.current, final_schedule)
        self.decisions: list[SwitchDecision] = []
        self.on_decision: Callable[[SwitchDecision], None] = lambda decision: None
        self._first = self.current
        # Since the last decision: steps, their seconds, sum of losses.
        self._window = [0.0] * 3
        self._freshest = min(
            self.candidates, key=lambda name: self.candidates[name].mean_staleness
        )
        self._lowest_loss = inf  # of all decisions
        self._last_loss = inf  # of the last decision
        # At which a fall-back ends; None: there is none.
        self._calm_loss: float | None = None
        self._before_fall_back = self.current
        self._programs: dict[str, Program] = {}
        runtime.time_costs(_TIMED_STEPS)

    def run(
        self, batches: Iterable[GlobalBatch], n_steps: int | None = None
    ) -> Iterator[StepResult]:
        """Train as :meth:`Runtime.run` does, with a pause at each decision.

        Args:
            batches: ``(inputs, targets)``, as in :meth:`Runtime.run`.
            n_steps: number of batches to take; all by default.

        Raises:
            UserError: the number of batches is unknown.
        """
        if n_steps is None:
            if not isinstance(batches, Sized):
                raise UserError("run() ends parts before a look: give n_steps")
            n_steps = len(batches)
        # One iterator: each run continues where the one before has stopped reading.
        remaining_batches = iter(batches)
        steps_left = n_steps
        while steps_left:
            length = min(steps_left, self.steps_to_decision())
            start = time.perf_counter()
            losses = []
            for result in self.runtime.run(remaining_batches, length):
                losses.append(result.loss_sum())
                yield result
                del result  # its memory is free before the next step
            seconds = time.perf_counter() - start
            self.record_steps(len(losses), seconds, mean_loss(self.runtime, losses))
            steps_left -= length

    def steps_to_decision(self) -> int:
        """Return the training steps until the next decision."""
        # Decisions are at multiples of `every`. With every=100, on costs alone::
        #
        #     step       100    200    300    400    500      600
        #     decision   same   -      -      -      change   next
        #
        every = self.options.every
        by_costs_alone = self.runtime.knows_costs and self.options.loss_factor is None
        intervals = 1
        last_interval = 0
        if self.decisions:
            last_interval = self.decisions[-1].step // every
            if by_costs_alone and not self.decisions[-1].reason:
                intervals = _RARER
        # A run may also have ended in between, such as for a checkpoint.
        next_interval = max(
            last_interval + intervals, self.runtime.steps_done // every + 1
        )
        return next_interval * every - self.runtime.steps_done

    def record_steps(self, n_steps: int, seconds: float, loss: float) -> None:
        """Count steps that have run; decide, if it is time to. Every rank calls it.

        Args:
            n_steps: their number, at most :meth:`steps_to_decision` before them.
            seconds: that they took together.
            loss: their mean, the same on every rank.
        """
        sums = zip(self._window, (n_steps, seconds, n_steps * loss), strict=True)
        self._window = [total + addend for total, addend in sums]
        if self.runtime.steps_done % self.options.every == 0:
            n_in_window, window_seconds, window_loss = self._window
            self._window = [0.0] * 3
            self.decide(window_seconds / n_in_window, window_loss / n_in_window)

    def decide(self, seconds: float, loss: float) -> SwitchDecision:
        """Choose the schedule of the next steps, and go over to it. Every rank calls it.

        Args:
            seconds: of a training step since the last decision.
            loss: mean of those steps, the same on every rank.
        """
        runtime = self.runtime
        name, reason = self._by_loss(loss)
        decision = SwitchDecision(runtime.steps_done, name, reason, seconds, loss)
        if runtime.knows_costs:
            costs, hardware = runtime.costs()
            # Measured costs differ between ranks, so one rank decides for all.
            if runtime.rank == 0:
                decision = self._by_costs(decision, costs, hardware)
            if runtime.world is not None:
                decision = runtime.world.gather(decision)[0]
        self._take(decision)
        # No message is under way here: record_steps is called between runs.
        if decision.reason:
            runtime.switch(self.candidates[decision.schedule])
        runtime.time_costs(_TIMED_STEPS)
        self.on_decision(decision)
        return decision

    def state(self) -> dict[str, Any]:
        """Return the decisions so far, as plain values."""
        decisions = [asdict(decision) for decision in self.decisions]
        return {"looks": decisions, "window": self._window}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Continue after :meth:`state` of an earlier run, whose own state the runtime loads next.

        Raises:
            UserError: the earlier run went over to a schedule that is no candidate.
        """
        schedule_plan = self.runtime.schedule_plan
        self._window = state["window"]
        # Decisions are repeated in their order: those on the loss depend on the ones before.
        for values in state["looks"]:
            decision = SwitchDecision(**values)
            if decision.schedule not in self.candidates:
                raise UserError(
                    f"the run has gone over to {decision.schedule}: give that as a candidate, too"
                )
            self._by_loss(decision.loss)
            self._take(decision)
            if decision.reason:
                schedule = self.candidates[decision.schedule]
                schedule_plan = switched(schedule_plan, decision.step, schedule)
        self.runtime.set_schedule(schedule_plan)

    def phases(self) -> list[tuple[str, int]]:
        """Return the schedules by which the run has trained, and the steps of each."""
        phases = []
        name, begin = self._first, 0
        for decision in self.decisions:
            if decision.reason:
                phases.append((name, decision.step - begin))
                name, begin = decision.schedule, decision.step
        return [*phases, (name, self.runtime.steps_done - begin)]

    def _take(self, decision: SwitchDecision) -> None:
        self.decisions.append(decision)
        self.current = decision.schedule

    def _by_loss(self, loss: float) -> tuple[str, str]:
        """Return the schedule that the loss asks for, and the reason if it is another."""
        factor = self.options.loss_factor or inf
        last_loss = self._last_loss
        self._last_loss = loss
        self._lowest_loss = min(self._lowest_loss, loss)
        # The loss at each decision, with loss_factor=1.5::
        #
        #     2.0   1.0   1.6    1.3    1.0
        #                 rose   .      calm     freshest schedule from "rose" to "calm"
        #
        # It is calm at 1.0, the loss of the decision before it rose.
        if self._calm_loss is None and loss > factor * self._lowest_loss:
            self._calm_loss = last_loss
            self._before_fall_back = self.current
            return self._freshest, LOSS_ROSE if self.current != self._freshest else ""
        if self._calm_loss is not None and loss <= self._calm_loss:
            self._calm_loss = None
            name = self._before_fall_back
            return name, LOSS_CALM if self.current != name else ""
        return self.current, ""

    def _by_costs(
        self, decision: SwitchDecision, costs: Costs, hardware: Hardware
    ) -> SwitchDecision:
        """Return ``decision`` with predictions, and the candidate that is fastest by them."""
        predicted = self._predict(costs, hardware)
        name, reason = decision.schedule, decision.reason
        if not reason and self._calm_loss is None:
            names = [*self.candidates]
            index = choose_schedule(
                [*self.candidates.values()],
                [*predicted.values()],
                names.index(name),
                self.options.threshold,
                self.options.staleness_price,
            )
            name = names[index]
            reason = COSTS if name != decision.schedule else ""
        return replace(
            decision,
            schedule=name,
            reason=reason,
            predicted=predicted,
            bandwidth=hardware.link_bandwidth,
            latency=hardware.link_latency,
        )

    def _predict(self, costs: Costs, hardware: Hardware) -> dict[str, float]:
        """Return the simulated seconds of a step by each candidate."""
        predicted = {}
        for name, schedule in self.candidates.items():
            if name not in self._programs:
                self._programs[name] = schedule.lower(steps_to_time(schedule)).verify()
            predicted[name] = simulate(self._programs[name], costs, hardware).step_time
        return predicted


def mean_loss(runtime: Runtime, losses: Sequence[Tensor]) -> float:
    """Return the mean of all ranks' ``losses``, each a sum and a count. Every rank calls it."""
    total, count = runtime.total(torch.stack([*losses]).sum(0).cpu()).tolist()
    return float(total / count)

"""Simulate a schedule for as many training steps as its steady state needs."""

import sys
from collections.abc import Sequence
from functools import cached_property
from math import isclose

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import Simulator
from toolkit.cost.stage_costs import Costs
from toolkit.cost.timeline import Timeline
from toolkit.schedule import Schedule
from toolkit.schedule.steady_state import steps_to_time

_FEWEST_STEPS = 3  # the first, whose ranks begin idle, and two that may be alike


class SteadySimulator:
    """Predicts steady steps of one schedule on several costs or machines.

    Without late weights a step begins when the one before has ended. So the fewest steps are
    lowered and verified that show two alike, and more only where costs keep them from being so.

    Args:
        schedule: any schedule.
        timed: steady training steps, at least, whose mean is the step time. Steps of a schedule
            with late weights differ where its messages wait, and may never repeat.
    """

    def __init__(self, schedule: Schedule, timed: int) -> None:
        self._schedule = schedule
        has_phases = any(schedule.changes(range(sys.maxsize)))
        self._repeats = schedule.max_staleness == 0 and not has_phases
        self._timed = 1 if self._repeats else timed

    # Each is lowered and verified once: only costs differ between timelines. The simulator relies
    # on the proof, and checks nothing itself.
    @cached_property
    def _of_fewest_steps(self) -> Simulator:
        return Simulator(self._schedule.lower(_FEWEST_STEPS).verify())

    @cached_property
    def _of_timed_steps(self) -> Simulator:
        n_steps = steps_to_time(self._schedule, self._timed)
        return Simulator(self._schedule.lower(n_steps).verify())

    def timeline(
        self, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float] = ()
    ) -> Timeline:
        """Return the predicted timeline; see :func:`toolkit.cost.simulate`."""
        if self._repeats:
            timeline = self._of_fewest_steps.timeline(costs, hardware, optimizer_bytes)
            begin, middle, end = timeline.step_ends
            if isclose(middle - begin, end - middle, rel_tol=1e-9):
                return timeline
        return self._of_timed_steps.timeline(costs, hardware, optimizer_bytes)


def simulate_steady_steps(
    schedule: Schedule,
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[float] = (),
    timed_steps: int = 4,
) -> Timeline:
    """Return the timeline of verified training steps up to the steady state, and of some in it.

    Args:
        schedule: a schedule of any kind.
        costs: one entry per stage.
        hardware: seconds of messages, and of kernels that were not measured.
        optimizer_bytes: as in :func:`toolkit.cost.simulate`.
        timed_steps: steady steps, at least, whose mean is the step time, unless steps repeat: see
            :class:`SteadySimulator`.
    """
    simulator = SteadySimulator(schedule, timed_steps)
    return simulator.timeline(costs, hardware, optimizer_bytes)

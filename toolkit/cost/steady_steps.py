"""Simulate a schedule for as many training steps as its steady state needs."""

from collections.abc import Sequence

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs
from toolkit.cost.timeline import Timeline
from toolkit.schedule import Schedule
from toolkit.schedule.steady_state import steps_to_time


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
        timed_steps: steady steps, at least, whose mean is the step time.
    """
    # Verified, so that the simulator may rely on the program: it checks nothing itself.
    program = schedule.lower(steps_to_time(schedule, timed_steps)).verify()
    return simulate(program, costs, hardware, optimizer_bytes)

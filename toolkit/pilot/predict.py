"""What the user's machines would make of a training step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from toolkit.cost import Costs, Hardware, StageCost, simulate
from toolkit.cost.hardware import check_hardware
from toolkit.errors import check_choice
from toolkit.schedule import Schedule
from toolkit.schedule.steady import steps_to_time

PLACEMENTS = ("per_microbatch", "per_stage", "one")


@dataclass(frozen=True)
class Prediction:
    """A training step under one rule.

    Attributes:
        seconds: from step to step.
        ratio: least, middle and largest ratio of that to DP's, with the slack of computing.
        without_links: seconds if messages took no time.
        memories: bytes of each device, at most.
    """

    seconds: float
    ratio: tuple[float, float, float]
    without_links: float
    memories: tuple[float, ...]


def check_placement(placement: str) -> None:
    """Refuse what is no placement of a pilot's workers.

    Raises:
        ValueError: it is another.
    """
    check_choice("placement", placement, PLACEMENTS)


def predict(
    schedules: Sequence[Schedule],
    costs: Costs,
    hardware: Hardware,
    optimizer_bytes: Sequence[int],
    slack: tuple[float, float],
) -> list[Prediction]:
    """A prediction of each schedule, the first of which is DP's.

    Args:
        costs: of the stages; their seconds count, where they were measured.
        hardware: the machines.
        optimizer_bytes: of the optimizer's state, by stage.
        slack: least and largest factor on the seconds of computing.
    """
    check_hardware(hardware)
    free = replace(hardware, link_bandwidth=inf, link_latency=0.0)
    slackened = [_scaled(costs, factor, hardware) for factor in slack]
    found: list[Prediction] = []
    baseline: list[float] = []
    for schedule in schedules:
        program = schedule.lower(steps_to_time(schedule)).verify()
        timeline, *others = (
            simulate(program, version, hardware, optimizer_bytes) for version in (costs, *slackened)
        )
        times = [timeline.step_time, *(other.step_time for other in others)]
        baseline = baseline or times
        ratios = [mine / theirs for mine, theirs in zip(times, baseline, strict=True)]
        found.append(
            Prediction(
                seconds=times[0],
                ratio=(min(ratios), ratios[0], max(ratios)),
                without_links=simulate(program, costs, free, optimizer_bytes).step_time,
                memories=tuple(timeline.peak_memory(rank) for rank in range(timeline.n_ranks)),
            )
        )
    return found


def _scaled(costs: Costs, factor: float, hardware: Hardware) -> tuple[StageCost, ...]:
    """The same stages where computing takes ``factor`` of the time."""
    timed = [(cost, cost.seconds(hardware)) for cost in costs]
    return tuple(
        replace(cost, forward_seconds=factor * forward, backward_seconds=factor * backward)
        for cost, (forward, backward) in timed
    )

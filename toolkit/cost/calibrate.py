"""Estimate costs and links from a measured timeline, to predict a similar run."""

from collections import defaultdict
from dataclasses import replace
from math import inf
from statistics import median

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.timeline import COMPUTE, UPDATE, Span, Timeline
from toolkit.schedule import Action, Schedule
from toolkit.schedule.program import rounds


def calibrate(timeline: Timeline, costs: Costs) -> tuple[tuple[StageCost, ...], Hardware]:
    """Return costs with each stage's median seconds, and hardware with the median message time.

    Messages take that time whatever their size; the memory bandwidth is that of the updates.

    Args:
        timeline: measured.
        costs: of the stages that ran.
    """
    seconds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    updates: list[float] = []  # seconds a byte
    meetings: defaultdict[tuple, list[Span]] = defaultdict(list)  # spans of one message
    for span in timeline.spans:
        taken, moved = span.end - span.start, costs[span.stage].update_bytes()
        if span.lane == COMPUTE:
            seconds[span.stage, span.computed].append(taken)
        elif span.lane == UPDATE:
            updates += [taken / moved] if moved else []
        else:
            meetings[span.name, span.stage, span.step, span.microbatch, span.start].append(span)
    timed = []
    for stage, cost in enumerate(costs):
        halves = [median(seconds[stage, kind]) for kind in "IW" if seconds[stage, kind]]
        whole = [median(seconds[stage, "B"])] if seconds[stage, "B"] else halves
        forward = median(seconds[stage, "F"])
        backward = max(0.0, sum(whole) - (forward if cost.recomputes else 0.0))
        timed.append(replace(cost, forward_seconds=forward, backward_seconds=backward))
    messages = []
    for met in meetings.values():
        for span in met:  # a collective is several messages that wait for each other
            action = Action[span.name.upper().replace("-", "_")] if span.peer is None else None
            n = rounds(action, len(met)) if action else 1
            messages.append((span.end - span.start) / max(1, n))
    bandwidth = 1 / median(updates) if updates and median(updates) else inf
    latency = median(messages) if messages else 0.0
    return tuple(timed), Hardware("calibrated", inf, bandwidth, inf, latency)


def predict_calibrated(timeline: Timeline, schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate ``schedule`` with the op and message times of a measured timeline.

    The prediction keeps only the kinds of memory that were measured, so that both can be compared.

    Args:
        timeline: measured, of ``schedule`` from its first step; as many steps are predicted.
        schedule: with one stage per entry of ``costs``.
        costs: of the stages that ran.
    """
    timed, links = calibrate(timeline, costs)
    prediction = simulate(schedule.lower(len(timeline.step_ends)), timed, links)
    kinds = {change.kind for change in timeline.changes}
    changes = [change for change in prediction.changes if change.kind in kinds]
    return replace(prediction, name=f"{prediction.name}, predicted", changes=changes)

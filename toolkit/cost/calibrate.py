"""Estimate costs and links from a measured timeline, to predict a similar run."""

from collections import defaultdict
from dataclasses import replace
from math import inf
from statistics import median

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.timeline import COMPUTE, RECEIVE, SEND, UPDATE, Span, Timeline
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
    for span in timeline.spans:
        if span.lane == COMPUTE:
            seconds[span.stage, span.computed].append(span.end - span.start)
    timed = []
    for stage, cost in enumerate(costs):
        halves = [median(seconds[stage, kind]) for kind in "IW" if seconds[stage, kind]]
        whole = [median(seconds[stage, "B"])] if seconds[stage, "B"] else halves
        forward = median(seconds[stage, "F"])
        again = forward if cost.recomputes else 0.0
        backward = max(0.0, sum(whole) - again)
        timed.append(replace(cost, forward_seconds=forward, backward_seconds=backward))
    meetings: defaultdict[tuple, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        if span.lane in (SEND, RECEIVE):
            meetings[span.name, span.stage, span.step, span.microbatch, span.start].append(span)
    messages = []
    for met in meetings.values():
        for span in met:  # a collective is several messages that wait for each other
            action = Action[span.name.upper().replace("-", "_")] if span.peer is None else None
            n = rounds(action, len(met)) if action else 1
            messages.append((span.end - span.start) / max(1, n))
    updates = [
        (s.end - s.start) / costs[s.stage].update_bytes()
        for s in timeline.spans
        if s.lane == UPDATE and costs[s.stage].update_bytes()
    ]
    links = Hardware(
        name="calibrated",
        flops=inf,
        memory_bandwidth=1 / median(updates) if updates and median(updates) else inf,
        link_bandwidth=inf,
        link_latency=median(messages) if messages else 0.0,
    )
    return tuple(timed), links


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

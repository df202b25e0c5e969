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
from toolkit.schedule.traffic import rounds


def calibrate(timeline: Timeline, costs: Costs) -> tuple[tuple[StageCost, ...], Hardware]:
    """Return costs with each stage's median seconds, and hardware with the median message time.

    Messages take that time whatever their size; the memory bandwidth is that of the updates.

    Args:
        timeline: measured.
        costs: of the stages that ran.
    """
    seconds_of_op: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    update_seconds_per_byte: list[float] = []  # seconds a byte
    spans_of_message: defaultdict[tuple, list[Span]] = defaultdict(list)  # spans of one message
    for span in timeline.spans:
        span_seconds, n_bytes = span.end - span.start, costs[span.stage].update_bytes()
        if span.lane == COMPUTE:
            seconds_of_op[span.stage, span.computed].append(span_seconds)
        elif span.lane == UPDATE:
            update_seconds_per_byte += [span_seconds / n_bytes] if n_bytes else []
        else:
            spans_of_message[span.name, span.stage, span.step, span.microbatch, span.start].append(
                span
            )
    timed_costs = []
    for stage, cost in enumerate(costs):
        half_medians = [
            median(seconds_of_op[stage, kind]) for kind in "IW" if seconds_of_op[stage, kind]
        ]
        backward_medians = (
            [median(seconds_of_op[stage, "B"])] if seconds_of_op[stage, "B"] else half_medians
        )
        forward = median(seconds_of_op[stage, "F"])
        backward = max(0.0, sum(backward_medians) - (forward if cost.recomputes else 0.0))
        timed_costs.append(replace(cost, forward_seconds=forward, backward_seconds=backward))
    message_seconds = []
    for spans in spans_of_message.values():
        for span in spans:  # a collective is several messages that wait for each other
            action = Action[span.name.upper().replace("-", "_")] if span.peer is None else None
            n_rounds = rounds(action, len(spans)) if action else 1
            message_seconds.append((span.end - span.start) / max(1, n_rounds))
    bandwidth = (
        1 / median(update_seconds_per_byte)
        if update_seconds_per_byte and median(update_seconds_per_byte)
        else inf
    )
    latency = median(message_seconds) if message_seconds else 0.0
    return tuple(timed_costs), Hardware("calibrated", inf, bandwidth, inf, latency)


def predict_calibrated(timeline: Timeline, schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate ``schedule`` with the op and message times of a measured timeline.

    The prediction keeps only the kinds of memory that were measured, so that both can be compared.

    Args:
        timeline: measured, of ``schedule`` from its first step; as many steps are predicted.
        schedule: with one stage per entry of ``costs``.
        costs: of the stages that ran.
    """
    timed_costs, links = calibrate(timeline, costs)
    prediction = simulate(schedule.lower(len(timeline.step_ends)), timed_costs, links)
    kinds = {change.kind for change in timeline.changes}
    changes = [change for change in prediction.changes if change.kind in kinds]
    return replace(prediction, name=f"{prediction.name}, predicted", changes=changes)

"""Estimate costs and links from a measured timeline, to predict a similar run."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from toolkit.cost.hardware import Hardware
from toolkit.cost.simulate import simulate
from toolkit.cost.stage_costs import Costs, StageCost
from toolkit.cost.timeline import COMPUTE, UPDATE, Span, Timeline
from toolkit.schedule import Action, Schedule
from toolkit.schedule.traffic import rounds


def calibrate(
    timeline: Timeline, costs: Costs
) -> tuple[tuple[StageCost, ...], Hardware]:
    """Return costs with each stage's median seconds, and hardware with the median message time.

    Messages take that time whatever their size; the memory bandwidth is that of the updates.

    Args:
        timeline: measured.
        costs: of the stages that ran.
    """
    seconds_of_op: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    update_seconds_per_byte: list[float] = []  # seconds a byte
    # Spans of one message.
    spans_of_message: defaultdict[tuple, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        span_seconds = span.end - span.start
        if span.lane == COMPUTE:
            seconds_of_op[span.stage, span.computed].append(span_seconds)
        elif span.lane == UPDATE:
            n_bytes = costs[span.stage].update_bytes()
            if n_bytes:
                update_seconds_per_byte.append(span_seconds / n_bytes)
        else:
            # Both ends of a message have a span, and so has each rank of a collective. They share
            # all of this.
            message = (span.name, span.stage, span.step, span.microbatch, span.start)
            spans_of_message[message].append(span)

    timed_costs = tuple(
        _timed(cost, stage, seconds_of_op) for stage, cost in enumerate(costs)
    )
    message_seconds = []
    for spans in spans_of_message.values():
        for span in spans:
            n_rounds = 1
            # A collective is several messages that wait for each other.
            if span.peer is None:
                action = Action[span.name.upper().replace("-", "_")]
                n_rounds = max(1, rounds(action, len(spans)))
            message_seconds.append((span.end - span.start) / n_rounds)

    # Without updates or messages there is nothing to fit: they take no time then.
    bandwidth = inf
    if update_seconds_per_byte and median(update_seconds_per_byte):
        bandwidth = 1 / median(update_seconds_per_byte)
    latency = 0.0
    if message_seconds:
        latency = median(message_seconds)
    # Ops have measured seconds, so the rate of arithmetic does not matter. A message has a latency
    # only, because messages of one size cannot show the bandwidth.
    return timed_costs, Hardware("calibrated", inf, bandwidth, inf, latency)


def _timed(
    cost: StageCost,
    stage: int,
    seconds_of_op: Mapping[tuple[int, str], Sequence[float]],
) -> StageCost:
    """Return a stage's costs with its measured seconds."""
    kinds = "IW"  # halves
    if seconds_of_op[stage, "B"]:
        kinds = "B"
    backward = 0.0
    for kind in kinds:
        if seconds_of_op[stage, kind]:
            backward += median(seconds_of_op[stage, kind])
    forward = median(seconds_of_op[stage, "F"])
    if cost.recomputes:
        # A measured backward contains the forward.
        backward = max(0.0, backward - forward)
    # A measured op contains its collectives among the devices of a rank.
    return replace(
        cost,
        forward_seconds=forward,
        backward_seconds=backward,
        exchange_seconds=0.0,
        backward_exchange_seconds=0.0,
    )


def predict_calibrated(
    timeline: Timeline, schedule: Schedule, costs: Costs
) -> Timeline:
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

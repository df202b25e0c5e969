"""What is tracked of a training run."""

import time
from collections.abc import Iterable
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from toolkit.results import metric_names
from toolkit.results.speed import Speed
from toolkit.results.tracker import Tracker, one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.cost import Timeline
    from toolkit.schedule import Schedule
    from toolkit.training import Epoch, Step

_MOST_DRAWN = 256  # micro-batches x stages of a schedule's image
_MOST_COUNTED = 4096  # of its tables


class Curves:
    """Logs training while it goes on.

    Args:
        tracker: to which.
        every: training steps from one logged point to the next. At those alone the loss is read,
            which waits for the device.
    """

    def __init__(self, tracker: Tracker, every: int) -> None:
        self._tracker, self._every = tracker, every
        self._steps = self._steps_per_epoch = 0
        self._speed = Speed()

    def trained(self, step: "Step") -> None:
        """A training step is done."""
        if not self._tracker.on:
            return
        self._steps, self._steps_per_epoch = step.result.step + 1, step.n_steps
        values: dict[str, Any] = {}
        due = self._steps % self._every == 0
        if due:
            values[metric_names.LEARNING_RATE] = step.learning_rate
            if len(step.result.losses):
                values[metric_names.TRAIN_LOSS] = float(step.result.loss)
        now = time.monotonic()
        self._speed.trained(step, now)
        if due and (rate := self._speed.rate(now)):
            values[metric_names.SPEED] = rate
            self._speed.restart(now)
        for delay in step.result.delays:
            for name, value in asdict(delay).items():
                if name not in ("step", "stage") and isfinite(value):
                    values[metric_names.of_delay(name, delay.stage)] = value
        if values:
            self._tracker.log(values, self._steps)

    def epoch(self, epoch: "Epoch") -> None:
        """An epoch is done."""
        self._log(epoch, self._steps)

    def whole(self, epochs: Iterable["Epoch"]) -> None:
        """These are all epochs of the run: log those from before it was tracked."""
        for epoch in epochs:
            if epoch.epoch not in self._tracker.epochs:
                self._log(epoch, (epoch.epoch + 1) * self._steps_per_epoch)

    def _log(self, epoch: "Epoch", step: int) -> None:
        found = {k: v for k, v in asdict(epoch).items() if v is not None}
        values = {
            metric_names.of_epoch(name): value for name, value in found.items() if name != "epoch"
        }
        self._tracker.log({"epoch": epoch.epoch, **values}, step)


def track_schedule(tracker: Tracker, schedule: "Schedule") -> None:
    """The schedule's grid; and the memory and the traffic to be expected, by slot.

    Activations are in those of one stage and micro-batch, traffic in parameters of a stage. Of a
    large schedule first the image is left out, and then the tables.
    """
    size = schedule.n_stages * schedule.n_microbatches
    if not tracker.on or size > _MOST_COUNTED:
        return
    from toolkit.schedule import steady_state

    try:
        steady = steady_state(schedule)
    except ValueError as error:  # of which training has its own opinion
        tracker.note(f"the schedule is not tracked: {one_line(error)}")
        return
    tracker.table(
        metric_names.ACTIVATIONS,
        [
            {"slot": slot, "all ranks": total, "fullest rank": max(held)}
            for slot, (total, held) in enumerate(
                zip(steady.total_activations, steady.activations, strict=True)
            )
        ],
    )
    tracker.table(
        metric_names.TRAFFIC,
        [
            {
                "slot": slot,
                "messages": sum(rank.messages for rank in sent),
                "all ranks": float(sum(rank.units for rank in sent)),
                "busiest rank": float(max(rank.units for rank in sent)),
            }
            for slot, sent in enumerate(steady.traffic)
        ],
    )
    if size <= _MOST_DRAWN:
        from toolkit.figures import schedules

        tracker.figure(metric_names.GRID, schedules([schedule]))


def track_measured(
    tracker: Tracker, timeline: "Timeline", figure: "Figure", ranks: list[dict[str, Any]]
) -> None:
    """What was measured: its figure, memory and traffic over time, and a row a rank."""
    if not tracker.on:
        return
    memory = [{"seconds": when, "bytes": held} for when, held in timeline.memory()]
    sent = [
        {"rank": s.rank, "start": s.start, "end": s.end, "bytes": s.bytes, "slot": s.slot}
        for s in timeline.spans
        if s.lane == "send"
    ]
    tracker.figure(metric_names.TIMELINE, figure)
    tracker.table(metric_names.MEASURED_MEMORY, memory)
    tracker.table(metric_names.MEASURED_MESSAGES, sent)
    tracker.table(metric_names.MEASURED_RANKS, ranks)

"""Tracked values of a training run, and their names in W&B."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from toolkit.errors import first_line
from toolkit.results.provenance import redacted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.cost import Timeline
    from toolkit.schedule import Schedule
    from toolkit.training import Epoch, Step

STEP, TRAIN_LOSS, LEARNING_RATE = "step", "train/loss", "train/lr"
GRID, TIMELINE = "schedule/grid", "measured/timeline"  # images
ACTIVATIONS, TRAFFIC = "schedule/activations_by_slot", "schedule/traffic_by_slot"  # tables
MEASURED_MEMORY, MEASURED_MESSAGES = "measured/memory", "measured/messages"
MEASURED_RANKS = "measured/ranks"

_MOST_DRAWN = 256  # micro-batches x stages of a schedule's image
_MOST_COUNTED = 4096  # of its tables
_reported: set[str] = set()  # notes that this process has printed


def of_epoch(metric: str) -> str:
    """Return the name of a metric after each epoch."""
    return f"epoch/{metric}"


def final(metric: str) -> str:
    """Return the name of a metric after the last epoch."""
    return f"final/{metric}"


def of_delay(name: str, stage: int | str) -> str:
    """Return the name of a delay diagnostic of ``stage``, which may be a pattern."""
    return f"delay/{name}_stage_{stage}"


def group_of(folder: Path) -> str:
    """Return the W&B group of a comparison's runs; in a sweep it starts with the sweep's name."""
    folder = folder.resolve()
    swept = (folder.parent / "sweep.json").exists()
    return "/".join(folder.parts[-2:] if swept else folder.parts[-1:])


class Tracker:
    """Discards what is logged; base class of the trackers that keep it.

    Attributes:
        on: whether anything is done with what is logged.
        notes: sentences on what went wrong.
        where: how to find the run, once it has ended.
    """

    on = False

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.where = ""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Log numbers at a training step of the run."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log rows, all with the same columns."""

    def figure(self, name: str, figure: "Figure") -> None:
        """Log a figure as an image."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set results of the whole run."""

    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Keep files with the run."""

    def end(self, state: str, status: int) -> None:
        """Set how the run has ended, and its exit status; the first call counts."""

    def close(self) -> None:
        """Finish the run."""

    def note(self, text: str) -> None:
        """Keep a note on what went wrong, and print it once in a process."""
        self.notes.append(text)
        if text not in _reported:
            _reported.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """Return the error's first line, without W&B's key."""
    return str(redacted(first_line(error)))


class Curves:
    """Logs training steps and epochs.

    Args:
        tracker: receives them.
        every: training steps from one logged point to the next. Only there the loss is read,
            since reading it waits for the device.
    """

    def __init__(self, tracker: Tracker, every: int) -> None:
        self._tracker, self._every = tracker, every
        self._steps = 0

    def trained(self, step: "Step") -> None:
        """Log a training step."""
        if not self._tracker.on:
            return
        self._steps = step.result.step + 1
        values: dict[str, Any] = {}
        if self._steps % self._every == 0:
            values[LEARNING_RATE] = step.learning_rate
            if len(step.result.losses):
                values[TRAIN_LOSS] = float(step.result.loss)
        for delay in step.result.delays:
            for name, value in asdict(delay).items():
                if name not in ("step", "stage") and isfinite(value):
                    values[of_delay(name, delay.stage)] = value
        if values:
            self._tracker.log(values, self._steps)

    def epoch(self, epoch: "Epoch") -> None:
        """Log an epoch's metrics."""
        values = {of_epoch(k): v for k, v in asdict(epoch).items() if k != "epoch"}
        known = {name: value for name, value in values.items() if value is not None}
        self._tracker.log({"epoch": epoch.epoch} | known, self._steps)


def track_schedule(tracker: Tracker, schedule: "Schedule") -> None:
    """Log a schedule's grid, and its expected memory and traffic by slot.

    The unit of memory is the activations of one stage and micro-batch; the unit of traffic is the
    parameters of one stage. Large schedules have tables and no image, the largest have neither.

    Args:
        tracker: receives them.
        schedule: schedule of the run.
    """
    size = schedule.n_stages * schedule.n_microbatches
    if not tracker.on or size > _MOST_COUNTED:
        return
    from toolkit.schedule import steady_state

    try:
        steady = steady_state(schedule)
    except ValueError as error:  # training may still accept the schedule
        tracker.note(f"the schedule is not tracked: {one_line(error)}")
        return
    held = zip(steady.total_activations, steady.activations, strict=True)
    tracker.table(
        ACTIVATIONS,
        [
            {"slot": slot, "all ranks": total, "fullest rank": max(by_rank)}
            for slot, (total, by_rank) in enumerate(held)
        ],
    )
    tracker.table(
        TRAFFIC,
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

        tracker.figure(GRID, schedules([schedule]))


def track_measured(
    tracker: Tracker, timeline: "Timeline", figure: "Figure", ranks: list[dict[str, Any]]
) -> None:
    """Log a measured timeline: its figure, memory and messages over time, and a row per rank.

    Args:
        tracker: receives them.
        timeline: the measured timeline; times in seconds, sizes in bytes.
        figure: drawing of the timeline.
        ranks: one row of measurements per rank.
    """
    if not tracker.on:
        return
    memory = [{"seconds": when, "bytes": held} for when, held in timeline.memory()]
    sent = [
        {"rank": s.rank, "start": s.start, "end": s.end, "bytes": s.bytes, "slot": s.slot}
        for s in timeline.spans
        if s.lane == "send"
    ]
    tracker.figure(TIMELINE, figure)
    tracker.table(MEASURED_MEMORY, memory)
    tracker.table(MEASURED_MESSAGES, sent)
    tracker.table(MEASURED_RANKS, ranks)

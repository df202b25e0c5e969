"""Values of a training run as they are known: tables on disk, and curves and tables in W&B."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.files import write_csv
from toolkit.results.provenance import one_line
from toolkit.results.record import Row, read_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from toolkit.cost import Timeline
    from toolkit.results.wandb_run import Tracker
    from toolkit.schedule import Schedule
    from toolkit.training import Epoch, Step

_MOST_OPS = 1024  # micro-batches x stages of a schedule that is tracked


class Ledger:
    """Rows of numbers, each written to a CSV file as soon as it is known.

    A row replaces the one with the same keys: a run that is resumed or rolled back repeats steps.
    While the file cannot be written, rows stay in memory.

    Args:
        path: the file.
        keys: columns of whole numbers that identify and order the rows.
        resume: start with the rows of the file.
        here: whether this process writes.
    """

    def __init__(
        self, path: Path, keys: Sequence[str], *, resume: bool = False, here: bool = True
    ) -> None:
        self.path, self.keys, self.here = path, tuple(keys), here
        self._rows: dict[tuple[int, ...], Row] = {}
        self._columns: dict[str, None] = {}  # in order
        self._on_disk = False  # whether the file has all rows
        if resume:
            self._take(read_csv(path, skip_damaged=True))

    def rows(self) -> list[Row]:
        """Return all rows, in the order of their keys."""
        return [self._rows[key] for key in sorted(self._rows)]

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, which may have more or fewer columns than those before."""
        expected = len(self._rows) + len(rows), len(self._columns)
        self._take(rows)
        if not rows or not self.here:
            return
        try:
            if self._on_disk and (len(self._rows), len(self._columns)) == expected:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            else:
                write_csv(self.path, [{k: r.get(k) for k in self._columns} for r in self.rows()])
            self._on_disk = True
        except OSError:
            self._on_disk = False

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._rows[tuple(row[key] for key in self.keys)] = dict(row)
            self._columns |= dict.fromkeys(row)


class Curves:
    """Logs training steps and epochs.

    Args:
        tracker: receives them.
        every: training steps from one logged point to the next. Only there the loss is read,
            since reading it waits for the device.
    """

    def __init__(self, tracker: "Tracker", every: int) -> None:
        self._tracker, self._every = tracker, every
        self._steps = 0

    def trained(self, step: "Step") -> None:
        """Log a training step."""
        if not self._tracker.on:
            return
        self._steps = step.result.step + 1
        values: dict[str, Any] = {}
        if self._steps % self._every == 0:
            values["train/lr"] = step.learning_rate
            if len(step.result.losses):
                values["train/loss"] = float(step.result.loss)
        for delay in step.result.delays:
            for name, value in asdict(delay).items():
                if name not in ("step", "stage") and isfinite(value):
                    values[f"delay/{name}_stage_{delay.stage}"] = value
        if values:
            self._tracker.log(values, self._steps)

    def epoch(self, epoch: "Epoch") -> None:
        """Log an epoch's metrics."""
        values = {f"epoch/{k}": v for k, v in asdict(epoch).items() if v is not None}
        self._tracker.log(values | {"epoch": values.pop("epoch/epoch")}, self._steps)


def track_schedule(tracker: "Tracker", schedule: "Schedule") -> None:
    """Log a schedule's grid, and its expected memory and traffic by slot, unless it is large.

    The unit of memory is the activations of one stage and micro-batch; the unit of traffic is the
    parameters of one stage.
    """
    if not tracker.on or schedule.n_stages * schedule.n_microbatches > _MOST_OPS:
        return
    from toolkit.figures import schedules
    from toolkit.schedule import steady_state

    try:
        steady = steady_state(schedule)
    except ValueError as error:  # training may still accept the schedule
        tracker.note(f"the schedule is not tracked: {one_line(error)}")
        return
    held = enumerate(zip(steady.total_activations, steady.activations, strict=True))
    tracker.table(
        "schedule/activations_by_slot",
        [{"slot": k, "all ranks": all_, "fullest rank": max(ranks)} for k, (all_, ranks) in held],
    )
    tracker.table(
        "schedule/traffic_by_slot",
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
    tracker.figure("schedule/grid", schedules([schedule]))


def track_measured(
    tracker: "Tracker", timeline: "Timeline", figure: "Figure", ranks: list[dict[str, Any]]
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
    columns = ["rank", "start", "end", "bytes", "slot"]
    sent = [span for span in timeline.spans if span.lane == "send"]
    tracker.figure("measured/timeline", figure)
    tracker.table("measured/memory", memory)
    tracker.table("measured/messages", [{k: getattr(s, k) for k in columns} for s in sent])
    tracker.table("measured/ranks", ranks)

"""What the explorer writes: figures, tables and traces."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.figures.explorer.analysis import Analysis
from toolkit.figures.explorer.choice import ORDERS_FILE, OWN

if TYPE_CHECKING:
    from toolkit.cost import Timeline


def write_png(shown: Sequence[Analysis], folder: Path) -> Path:
    """The toolkit's figure of the schedules side by side."""
    from toolkit.figures import save, schedules

    figure = schedules([analysis.schedule for analysis in shown], len(shown[0].drawn.steps))
    name = "_and_".join(_stem(analysis) for analysis in shown)
    return save(figure, _in(folder) / name)[0]


def write_csv(analysis: Analysis, folder: Path) -> Path:
    """The rank orders, where ranks have an order of their own; else a table of ops."""
    if analysis.choice.schedule == OWN:
        path = _in(folder) / ORDERS_FILE
        rows = [line.split() for line in analysis.choice.orders if line.strip()]
        path.write_text("".join(f"{','.join(row)}\n" for row in rows))
        return path
    path = _in(folder) / f"{_stem(analysis)}.csv"
    try:
        path.write_text(analysis.schedule.to_csv())
    except ValueError:  # not a pipeline
        path.write_text(ops_table(analysis))
    return path


def write_trace(analysis: Analysis, timeline: "Timeline", folder: Path) -> Path:
    """The simulated timeline, for ui.perfetto.dev."""
    path = _in(folder) / f"{_stem(analysis)}.trace.json"
    timeline.to_chrome_trace(path)
    return path


def ops_table(analysis: Analysis) -> str:
    """The ops of one training step as CSV: a row an op, in the order of time."""
    schedule = analysis.schedule
    tick = schedule.timing.ticks_per_slot
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["op", "kind", "stage", "microbatch", "rank", "slot", "staleness"])
    for op, start in sorted(schedule.timing.starts.items(), key=lambda item: (item[1], item[0])):
        rank, late = (
            schedule.rank(op.stage, op.microbatch),
            schedule.staleness[op.stage][op.microbatch],
        )
        row = [str(op), op.kind.name, op.stage, op.microbatch, rank, f"{start / tick:g}", late]
        writer.writerow(row)
    return text.getvalue()


def _in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stem(analysis: Analysis) -> str:
    name = analysis.choice.schedule.replace(" ", "_")
    return f"{name}_{analysis.schedule.n_stages}x{analysis.schedule.n_microbatches}"

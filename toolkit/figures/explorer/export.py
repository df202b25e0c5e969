"""What the explorer writes: figures, tables and traces."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.figures.explorer.analysis import Analysis
from toolkit.figures.explorer.choice import ORDERS_FILE, OWN
from toolkit.figures.schedule import schedules
from toolkit.figures.style import save

if TYPE_CHECKING:
    from toolkit.cost import Timeline


def write_png(shown: Sequence[Analysis], folder: Path) -> list[Path]:
    """The toolkit's figure of the schedules side by side."""
    figure = schedules([analysis.schedule for analysis in shown], len(shown[0].drawn.steps))
    name = "_and_".join(_stem(analysis) for analysis in shown)
    return [save(figure, _in(folder) / name)[0]]


def write_csv(shown: Sequence[Analysis], folder: Path) -> list[Path]:
    """Of each the rank orders, where ranks have an order of their own; else a table of ops."""
    own = Path(ORDERS_FILE).stem
    stems = [own if a.choice.schedule == OWN else _stem(a) for a in shown]
    paths = [_in(folder) / f"{name}.csv" for name in _told_apart(stems)]
    for path, analysis in zip(paths, shown, strict=True):
        path.write_text(_csv(analysis))
    return paths


def write_traces(
    shown: Sequence[Analysis], timelines: "Sequence[Timeline]", folder: Path
) -> list[Path]:
    """The simulated timeline of each, for ui.perfetto.dev."""
    names = _told_apart([_stem(analysis) for analysis in shown])
    paths = [_in(folder) / f"{name}.trace.json" for name in names]
    for path, timeline in zip(paths, timelines, strict=True):
        timeline.to_chrome_trace(path)
    return paths


def _csv(analysis: Analysis) -> str:
    if analysis.choice.schedule == OWN:
        rows = [line.split() for line in analysis.choice.orders if line.strip()]
        return "".join(f"{','.join(row)}\n" for row in rows)
    try:
        return analysis.schedule.to_csv()
    except ValueError:  # not a pipeline
        return ops_table(analysis)


def ops_table(analysis: Analysis) -> str:
    """The ops of one training step as CSV: a row an op, in the order of time."""
    schedule = analysis.schedule
    tick = schedule.timing.ticks_per_slot
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["op", "kind", "stage", "microbatch", "rank", "slot", "staleness"])
    for op, start in sorted(schedule.timing.starts.items(), key=lambda item: (item[1], item[0])):
        rank = schedule.rank(op.stage, op.microbatch)
        late = schedule.staleness[op.stage][op.microbatch]
        row = [str(op), op.kind.name, op.stage, op.microbatch, rank, f"{start / tick:g}", late]
        writer.writerow(row)
    return text.getvalue()


def _in(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _stem(analysis: Analysis) -> str:
    name = analysis.choice.schedule.replace(" ", "_")
    return f"{name}_{analysis.schedule.n_stages}x{analysis.schedule.n_microbatches}"


def _told_apart(names: Sequence[str]) -> list[str]:
    """``names``, numbered where they are alike."""
    return [f"{x}_{k}" if names.count(x) > 1 else x for k, x in enumerate(names, 1)]

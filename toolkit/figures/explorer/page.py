"""The parts of the page around a drawing, as HTML that needs neither script nor network."""

import csv
import io
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.figures.explorer.choice import ORDERS_FILE, OWN, Choice
from toolkit.figures.explorer.drawing import draw, element, frame_of, table
from toolkit.figures.explorer.inspection import Analysis, Number, analyse, predict
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import BLUE, ORANGE, PURPLE, SKY, VERMILION, YELLOW, save
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    from toolkit.cost import Timeline

_COLOURS = {
    "forward": SKY,
    "backward": ORANGE,
    "weight": YELLOW,
    "memory": BLUE,
    "traffic": PURPLE,
    "wrong": VERMILION,
}


def styles() -> str:
    """The look of all parts."""
    text = resources.files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")
    for name, colour in _COLOURS.items():
        text = text.replace(f"var(--{name})", colour)
    return element("style", text)


def pane(schedule: Schedule, numbers: Sequence[Number], drawn: str) -> str:
    """One schedule: its name, key numbers, staleness and drawing."""
    head, facts, matrix = element("h3", escape(schedule.name)), key_numbers(numbers), ""
    if _is_large(schedule):
        matrix = staleness(schedule)
    else:
        facts += staleness(schedule)
    beside = element("div", facts, class_="cdp-facts")
    return element("div", head + beside + drawn + matrix, class_="cdp-pane")


def _is_large(schedule: Schedule) -> bool:
    return max(schedule.n_stages, schedule.n_microbatches) > 8


def key_numbers(numbers: Sequence[Number]) -> str:
    """A table of name, value and unit; what a number means shows as one points at it."""
    rows = (
        (
            element("th", escape(n.name), scope="row", title=n.meaning),
            element("td", escape(n.value), class_="cdp-number"),
            element("td", escape(n.unit), class_="cdp-unit"),
        )
        for n in numbers
    )
    return table(rows, class_="cdp-numbers", aria_label="key numbers")


def staleness(schedule: Schedule) -> str:
    """Stages down, micro-batches across: steps by which the weights read are late."""
    most = max(1, schedule.max_staleness)
    head = [element("th", "")]
    head += [element("th", str(m), scope="col") for m in range(schedule.n_microbatches)]
    rows = [head]
    for j, row in enumerate(schedule.staleness):
        cells = (_shaded(late, most) for late in row)
        rows.append([element("th", str(j), scope="row"), *cells])
    css = "cdp-staleness cdp-small" if _is_large(schedule) else "cdp-staleness"
    caption = element("div", "staleness")
    note = element("div", "stages down, micro-batches across")
    body = table(rows, class_=css, aria_label="staleness, stages down, micro-batches across")
    return element("div", caption + body + note, class_="cdp-matrix")


def _shaded(late: int, most: int) -> str:
    shade = f"background:rgba(213,94,0,{0.45 * late / most:.2f})" if late else ""
    return element("td", str(late), style=shade) if shade else element("td", "0")


def legend() -> str:
    """What the colours and bars of drawings mean."""
    keys = (
        ("forward", "forward"),
        ("backward", "backward"),
        ("weight", "backward of weights"),
        ("stale", "reads stale weights"),
    )
    items = "".join(f'<span><i class="cdp-key-{css}"></i>{name}</span>' for css, name in keys)
    note = "<span>deeper colour: later step; point at an op for what it waits for and frees</span>"
    return element("div", items + note, class_="cdp-legend")


def message(sentence: str, grid: str = "") -> str:
    """What is wrong, in one sentence; and the grid that shows where."""
    below = element("pre", escape(grid)) if grid else ""
    return element("div", element("p", escape(sentence)) + below, class_="cdp-wrong", role="alert")


def looked_up(said: str) -> str:
    """What an op waits for and frees, in lines."""
    return element("pre", escape(said), class_="cdp-found", role="status")


def faded(drawn: str) -> str:
    """The last good drawing, while something is wrong."""
    return element("div", drawn, class_="cdp-faded", inert="inert") if drawn else ""


def side_by_side(panes: Sequence[str]) -> str:
    """Panes beside each other, or below where there is no room."""
    return element("div", "".join(panes), class_="cdp-panes")


def standalone(title: str, body: str) -> str:
    """A whole document."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>{styles()}'
    whole = f'<body style="margin:16px">{body}</body>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head>{whole}</html>'


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


_STEPS = 3  # training steps drawn


def explored(choices: Sequence[Choice]) -> str:
    """HTML without script: drawings to point at, key numbers with an op of a slot a stage.

    Raises:
        ValueError: a choice that is impossible.
    """
    from toolkit.cost import UNIT, unit_costs

    panes, analyses = [], [analyse(choice, _STEPS) for choice in choices]
    frame = frame_of(analyses)
    for analysis in analyses:
        timeline = predict(analysis, unit_costs(analysis.schedule.n_stages), UNIT)
        numbers = analysis.numbers(timeline, in_slots=True)
        panes.append(pane(analysis.schedule, numbers, draw(analysis.choice, _STEPS, frame)))
    return styles() + side_by_side(panes) + legend()

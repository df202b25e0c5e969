"""The parts of the page around a drawing, as HTML that needs neither script nor network."""

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.figures.explorer.choice import ORDERS_FILE, OWN, Choice
from toolkit.figures.explorer.drawing import draw, element, frame_of
from toolkit.figures.explorer.inspection import Analysis, Number, analyse, predict
from toolkit.figures.schedule_figure import schedules
from toolkit.figures.style import BLUE, ORANGE, PURPLE, SKY, VERMILION, YELLOW, save
from toolkit.schedule import Schedule

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.cost import Timeline

_COLOURS = {
    "forward": SKY,
    "backward": ORANGE,
    "weight": YELLOW,
    "memory": BLUE,
    "traffic": PURPLE,
    "wrong": VERMILION,
}
_KEYS = {
    "forward": "forward",
    "backward": "backward",
    "weight": "backward of weights",
    "stale": "reads stale weights",
}
LEGEND = element(
    "div",
    "".join(f'<span><i class="cdp-key-{css}"></i>{name}</span>' for css, name in _KEYS.items())
    + "<span>deeper colour: later step; point at an op for what it waits for and frees</span>",
    class_="cdp-legend",
)
_STEPS = 3  # training steps drawn


def styles() -> str:
    """The style sheet of all parts."""
    text = resources.files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")
    for name, colour in _COLOURS.items():
        text = text.replace(f"var(--{name})", colour)
    return element("style", text)


def pane(schedule: Schedule, numbers: Sequence[Number], drawn: str) -> str:
    """One schedule: its name, key numbers, staleness and drawing.

    Args:
        schedule: names the pane.
        numbers: key numbers; the meaning of one shows as the mouse points at it.
        drawn: its drawing, HTML.
    """
    facts = _table(
        (
            (
                element("th", escape(n.name), scope="row", title=n.meaning),
                element("td", escape(n.value), class_="cdp-number"),
                element("td", escape(n.unit), class_="cdp-unit"),
            )
            for n in numbers
        ),
        class_="cdp-numbers",
        aria_label="key numbers",
    )
    large = max(schedule.n_stages, schedule.n_microbatches) > 8
    matrix = _staleness(schedule, "cdp-staleness cdp-small" if large else "cdp-staleness")
    top = element("div", facts if large else facts + matrix, class_="cdp-facts")
    parts = [element("h3", escape(schedule.name)), top, drawn, matrix if large else ""]
    return element("div", "".join(parts), class_="cdp-pane")


def _staleness(schedule: Schedule, css: str) -> str:
    most, where = max(1, schedule.max_staleness), "stages down, micro-batches across"
    header = [element("th", str(m), scope="col") for m in range(schedule.n_microbatches)]
    cells = [[element("th", ""), *header]]
    for j, row in enumerate(schedule.staleness):
        shades = (
            {"style": f"background:rgba(213,94,0,{0.45 * late / most:.2f})"} if late else {}
            for late in row
        )
        found = [element("td", str(late), **s) for late, s in zip(row, shades, strict=True)]
        cells.append([element("th", str(j), scope="row"), *found])
    body = _table(cells, class_=css, aria_label=f"staleness, {where}")
    return element("div", f"<div>staleness</div>{body}<div>{where}</div>", class_="cdp-matrix")


def _table(rows: Iterable[Sequence[str]], **attributes: object) -> str:
    return element("table", "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows), **attributes)


def message(sentence: str, grid: str = "") -> str:
    """What is wrong, in one sentence, and the grid that shows where."""
    below = element("pre", escape(grid)) if grid else ""
    return element("div", element("p", escape(sentence)) + below, class_="cdp-wrong", role="alert")


def looked_up(said: str) -> str:
    """What an op waits for and frees, in lines."""
    return element("pre", escape(said), class_="cdp-found", role="status")


def faded(drawn: str) -> str:
    """The last possible drawing, while the choice is impossible."""
    return element("div", drawn, class_="cdp-faded", inert="inert") if drawn else ""


def line(name: str, value: str) -> str:
    """A line of text to copy."""
    return (
        f'<label class="cdp-line"><span>{name}</span><input readonly value="{escape(value)}"'
        f' aria-label="{name}: the schedule as text to copy" onfocus="this.select()"></label>'
    )


def side_by_side(panes: Sequence[str]) -> str:
    """Panes side by side, or one below another on a narrow page."""
    return element("div", "".join(panes), class_="cdp-panes")


def standalone(title: str, body: str) -> str:
    """A whole document."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title>{styles()}'
    whole = f'<body style="margin:16px">{body}</body>'
    return f'<!DOCTYPE html><html lang="en"><head>{head}</head>{whole}</html>'


def explored(choices: Sequence[Choice]) -> str:
    """HTML without script: drawings side by side, with key numbers of uniform stages.

    Raises:
        UserError: a choice is impossible.
    """
    from toolkit.cost import UNIT, unit_costs

    analyses = [analyse(choice, _STEPS) for choice in choices]
    frame, panes = frame_of(analyses), []
    for analysis in analyses:
        timeline = predict(analysis, unit_costs(analysis.schedule.n_stages), UNIT)
        numbers = analysis.numbers(timeline, in_slots=True)
        panes.append(pane(analysis.schedule, numbers, draw(analysis.choice, _STEPS, frame)))
    return styles() + side_by_side(panes) + LEGEND


def write_png(shown: Sequence[Analysis], folder: Path) -> list[Path]:
    """Write the figure of the schedules side by side."""
    figure = schedules([analysis.schedule for analysis in shown], len(shown[0].drawn.steps))
    folder.mkdir(parents=True, exist_ok=True)
    return [save(figure, folder / "_and_".join(map(_stem, shown)))[0]]


def write_csv(shown: Sequence[Analysis], folder: Path) -> list[Path]:
    """Write the rank orders of each pipeline, and a table of ops of any other schedule."""
    own = Path(ORDERS_FILE).stem
    stems = [own if a.choice.schedule == OWN else _stem(a) for a in shown]
    paths = _paths(folder, stems, ".csv")
    for path, analysis in zip(paths, shown, strict=True):
        try:
            path.write_text(analysis.schedule.to_csv())
        except ValueError:  # not a pipeline
            _ops(analysis.schedule).to_csv(path, index=False)
    return paths


def write_traces(
    shown: Sequence[Analysis], timelines: "Sequence[Timeline]", folder: Path
) -> list[Path]:
    """Write the simulated timeline of each, for ui.perfetto.dev."""
    paths = _paths(folder, [*map(_stem, shown)], ".trace.json")
    for path, timeline in zip(paths, timelines, strict=True):
        timeline.to_chrome_trace(path)
    return paths


def _ops(schedule: Schedule) -> "pd.DataFrame":
    """One row for each op of a training step, in the order of time."""
    import pandas as pd

    tick, rows = schedule.timing.ticks_per_slot, []
    for op, start in sorted(schedule.timing.starts.items(), key=lambda item: (item[1], item[0])):
        j, m = op.stage, op.microbatch
        row = {"op": str(op), "kind": op.kind.name, "stage": j, "microbatch": m}
        row |= {"rank": schedule.rank(j, m), "slot": f"{start / tick:g}"}
        rows.append(row | {"staleness": schedule.staleness[j][m]})
    return pd.DataFrame(rows)


def _stem(analysis: Analysis) -> str:
    name = analysis.choice.schedule.replace(" ", "_")
    return f"{name}_{analysis.schedule.n_stages}x{analysis.schedule.n_microbatches}"


def _paths(folder: Path, stems: Sequence[str], ending: str) -> list[Path]:
    """Files in ``folder``, numbered if their stems are equal."""
    folder.mkdir(parents=True, exist_ok=True)
    alike = len({*stems}) < len(stems)
    return [folder / f"{s}{f'_{k}' if alike else ''}{ending}" for k, s in enumerate(stems, 1)]

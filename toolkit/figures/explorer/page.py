"""The parts of the page around a drawing, as HTML that needs neither script nor network."""

from collections.abc import Sequence
from html import escape
from importlib import resources

from toolkit.figures.explorer.analysis import Number
from toolkit.figures.explorer.svg import element, table
from toolkit.figures.style import BLUE, ORANGE, PURPLE, SKY, VERMILION, YELLOW
from toolkit.schedule import Schedule

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

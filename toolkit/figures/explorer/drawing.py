"""A program as SVG: its grid, and over the same slots its activations and its traffic."""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from html import escape
from typing import NamedTuple

from toolkit.figures.explorer.choice import Choice
from toolkit.figures.explorer.inspection import Analysis, analyse, texts
from toolkit.figures.schedule_figure import Cell, cells
from toolkit.schedule import Action, Program
from toolkit.schedule.grid import rows

_CLASS = {
    Action.FORWARD: "f",
    Action.BACKWARD: "b",
    Action.BACKWARD_INPUT: "b",
    Action.BACKWARD_WEIGHT: "w",
}
# Pixels
_AXIS = 18  # numbers of slots
_CHART, _ROOM = 84, 16  # a chart; its part above the largest value, for a label
_GUTTER = 74  # left of the slots
_WIDE, _NARROW = 740.0, 340.0  # for the slots, of one drawing and of two side by side
_ONE_DIGIT, _TWO_DIGITS, _LARGEST = 8.0, 13.0, 36.0  # of a slot: at least, and at most
_GROWTH = 1.35  # most that a drawing grows where there is room


class Frame(NamedTuple):
    """The common scale of drawings side by side.

    Attributes:
        slots: of the longest.
        slot: pixels of a slot.
        activations: most in any slot, in micro-batches.
        sent: most in any slot, in stage-parameters.
    """

    slots: int
    slot: float
    activations: Fraction
    sent: Fraction


def frame_of(shown: Sequence[Analysis]) -> Frame:
    """The frame of drawings that stand side by side."""
    slots = max(analysis.drawn.n_slots for analysis in shown)
    room = _WIDE if len(shown) == 1 else _NARROW
    two_digits = max(analysis.schedule.n_stages for analysis in shown) > 10
    least = _TWO_DIGITS if two_digits else _ONE_DIGIT
    return Frame(
        slots,
        min(_LARGEST, max(least, room / (slots + 1))),
        max(max(analysis.peak, *analysis.activations) for analysis in shown),
        max(max(analysis.most_sent, *analysis.traffic) for analysis in shown),
    )


@lru_cache(maxsize=32)
def draw(choice: Choice, n_steps: int, frame: Frame) -> str:
    """Draw ``choice`` as HTML that scrolls where it is too large.

    Args:
        choice: what is drawn.
        n_steps: training steps.
        frame: of all drawings side by side.

    Raises:
        UserError: the choice is impossible.
    """
    analysis = analyse(choice, n_steps)
    schedule = analysis.schedule
    what, n_rows = rows(schedule.layout)
    row = 22.0 if n_rows <= 12 else 16.0 if n_rows <= 32 else 12.0
    width = _GUTTER + (frame.slots + 1) * frame.slot
    plot = f'style="min-width:{number(width)}px;max-width:{number(width * _GROWTH)}px"'
    size = min(11.0, row - 2)
    short = "mb" if schedule.one_device else "rank"
    names = "".join(
        _text(f"{short} {k}", _GUTTER - 6, (k + 0.5) * row + size * 0.35, font_size=size)
        for k in range(n_rows)
    )
    look = {"class_": "cdp-names", "aria_hidden": "true"}
    axes = "".join(
        _text(name, _GUTTER - 6, y, font_size=11)
        for name, y in (
            ("activations", _AXIS + 0.5 * _CHART + _ROOM / 2),
            ("sent", _AXIS + 1.5 * _CHART + _ROOM / 2),
            ("slot", 13),
        )
    )
    return (
        '<div class="cdp-scroll" role="group" tabindex="0"'
        f' aria-label="{escape(schedule.name)}: grid, activations and traffic">'
        f'<div class="cdp-plot" {plot}>'
        + _svg(names, _GUTTER, n_rows * row, "rows", **look)
        + _grid(analysis.drawn, what, n_rows, row, frame)
        + f'</div><div class="cdp-plot cdp-charts" {plot}>'
        + _svg(axes, _GUTTER, _AXIS + 2 * _CHART + 2, "axes", **look)
        + _charts(analysis, frame)
        + "</div></div>"
    )


def _grid(program: Program, what: str, n_rows: int, height: float, frame: Frame) -> str:
    name, period = program.schedule.name, program.schedule.period * frame.slot
    wide = 0.85 if program.schedule.n_stages <= 10 else 0.66
    font = min(12.0, height - 4, frame.slot * wide)
    hover = [texts(program, rank) for rank in range(len(program.ranks))]
    by_row: list[list[tuple[Cell, str]]] = [[] for _ in range(n_rows)]
    for cell in cells(program):
        title = hover[cell.rank][cell.position]
        by_row[cell.row].append((cell, _cell(cell, title, frame.slot, height, font)))
    starts = (number(k * period) for k in range(1, len(program.steps)))  # of training steps
    lines = "".join(f"M{x} 0V{number(n_rows * height)}" for x in starts)
    content = [element("path", d=lines, class_="cdp-step")]
    for row, found in enumerate(by_row):
        found.sort(key=lambda pair: pair[0].slot)
        label = f"{what} {row}: {' '.join(cell.label for cell, _ in found)}"
        content.append(
            f'<g class="cdp-row" tabindex="0" role="group" aria-label="{label}"'
            f' transform="translate(0 {number(row * height)})">'
            f"{''.join(drawn for _, drawn in found)}</g>"
        )
    label = f"{name}: ops of {len(program.steps)} training steps"
    look = {"class_": "cdp-grid", "role": "group", "font_size": number(font)}
    width = (frame.slots + 1) * frame.slot
    return _svg("".join(content), width, n_rows * height, label, **look)


def _cell(cell: Cell, title: str, w: float, h: float, font: float) -> str:
    """An op: its stage on its colour, and a bar below where it reads stale weights."""
    x, y = cell.slot * w, h * 0.5 + font * 0.36 - (1.5 if cell.stale else 0)
    bar = f'<path d="M{number(x + 0.2 * w)} {number(h - 3)}h{number(0.6 * w)}"/>'
    return (
        f'<g class="cdp-{_CLASS[cell.action]} cdp-s{cell.step % 3}" tabindex="-1">'
        f"<title>{escape(title, quote=False)}</title>"
        f'<rect x="{number(x + 0.5)}" y="1" width="{number(w - 1)}" height="{number(h - 2)}"/>'
        f'<text x="{number(x + w / 2)}" y="{number(y)}">{cell.stage}</text>'
        f"{bar if cell.stale else ''}</g>"
    )


def _charts(analysis: Analysis, frame: Frame) -> str:
    slot = frame.slot
    peak = f"peak {float(analysis.peak):.4g} micro-batches"
    busiest = f"most {float(analysis.most_sent):.4g} stage-parameters a slot"
    every = next(k for k in (1, 2, 5, 10, 20, 50, 100) if k * slot >= 26)
    parts = [
        _text(str(k), (k + 0.5) * slot, 13, class_="cdp-slot") for k in range(0, frame.slots, every)
    ]
    for k, (css, values, steady, largest, label) in enumerate(
        (
            ("cdp-memory", analysis.activations, analysis.peak, frame.activations, peak),
            ("cdp-traffic", analysis.traffic, analysis.most_sent, frame.sent, busiest),
        )
    ):
        zero, width = _AXIS + (k + 1) * _CHART, len(values) * slot
        unit = (_CHART - _ROOM - 6) / (float(largest) or 1.0)
        level = zero - float(steady) * unit
        parts += [
            element("path", d=steps([*map(float, values)], slot, zero, unit), class_=css),
            element("path", d=f"M0 {number(zero)}H{number(width)}", class_="cdp-base"),
            element("path", d=f"M0 {number(level)}H{number(width)}", class_="cdp-most"),
            _text(label, 3, level - 3, class_="cdp-value"),
        ]
    label = f"activations of all ranks: {peak}; sent by all ranks: {busiest}"
    size = (frame.slots + 1) * slot, _AXIS + 2 * _CHART + 2
    return _svg("".join(parts), *size, label, role="img", class_="cdp-chart")


def steps(values: Sequence[float], width: float, y_of_zero: float, scale: float) -> str:
    """Path of a curve that is constant in each of equal intervals, closed at zero."""
    words = [f"M0 {number(y_of_zero)}"]
    for k, value in enumerate(values):
        words.append(f"V{number(y_of_zero - value * scale)}H{number((k + 1) * width)}")
    return "".join([*words, f"V{number(y_of_zero)}Z"])


def element(tag: str, content: str = "", **attributes: object) -> str:
    """``<tag ...>content</tag>``; ``class_`` stands for class, ``aria_label`` for aria-label."""
    words = [
        tag,
        *(f'{k.rstrip("_").replace("_", "-")}="{escape(str(v))}"' for k, v in attributes.items()),
    ]
    return f"<{' '.join(words)}>{content}</{tag}>"


def _text(content: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escape(content), x=number(x), y=number(y), **attributes)


def _svg(content: str, width: float, height: float, label: str, **attributes: object) -> str:
    """An image with a text alternative, which scales with the page."""
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        style=f"flex:{number(width)} 1 {number(width)}px",
        aria_label=label,
        **attributes,
    )


def number(value: float) -> str:
    """Two decimals, without trailing zeros: a drawing has thousands of numbers."""
    return f"{value:.2f}".rstrip("0").rstrip(".")

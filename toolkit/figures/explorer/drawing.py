"""A program as a drawing: its grid, and over the same slots its activations and its traffic."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from html import escape
from typing import NamedTuple

from toolkit.figures.explorer.choice import Choice
from toolkit.figures.explorer.inspection import Analysis, analyse, texts
from toolkit.schedule import Action, Instruction, Program, Schedule
from toolkit.schedule.grid import row_of, rows

_CLASS = {
    Action.FORWARD: "f",
    Action.BACKWARD: "b",
    Action.BACKWARD_INPUT: "b",
    Action.BACKWARD_WEIGHT: "w",
}
_AXIS = 18  # pixels of the numbers of slots
_CHART = 84  # of a chart, with room for its highest label
_ROOM = 16  # of that, above its largest value
_GUTTER = 74  # of what stands left of the slots
_WIDE, _NARROW = 740.0, 340.0  # that slots share, of one drawing and of two side by side
_ONE_DIGIT, _TWO_DIGITS, _LARGEST = 8.0, 13.0, 36.0  # of a slot: at least, and at most
_GROWTH = 1.35  # of a drawing, at most, where there is more room


class Frame(NamedTuple):
    """What drawings side by side share, so that their lengths and heights can be compared.

    Attributes:
        slots: of the longest.
        slot: pixels of one.
        activations: the most of any slot, in micro-batches.
        sent: likewise, in stage-parameters.
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


class _Scale(NamedTuple):
    """Pixels of a slot, of a row and of the letters in a cell."""

    slot: float
    row: float
    font: float


@lru_cache(maxsize=32)
def draw(choice: Choice, n_steps: int, frame: Frame) -> str:
    """The drawing of ``choice`` as HTML, scrolled where it is too large.

    Args:
        choice: what is drawn.
        n_steps: training steps drawn.
        frame: of it, and of what stands beside it.

    Raises:
        ValueError: it is impossible.
    """
    analysis = analyse(choice, n_steps)
    program = analysis.drawn
    _, n_rows = rows(program.schedule.layout)
    row = 22.0 if n_rows <= 12 else 16.0 if n_rows <= 32 else 12.0
    wide = 0.85 if program.schedule.n_stages <= 10 else 0.66
    scale = _Scale(frame.slot, row, min(12.0, row - 4, frame.slot * wide))
    width = _GUTTER + (frame.slots + 1) * scale.slot
    plot = f'style="min-width:{number(width)}px;max-width:{number(width * _GROWTH)}px"'
    return "".join(
        [
            '<div class="cdp-scroll" role="group" tabindex="0"',
            f' aria-label="{escape(analysis.schedule.name)}: grid, activations and traffic">',
            f'<div class="cdp-plot" {plot}>',
            _row_names(program.schedule, n_rows, scale),
            _grid(program, scale, frame),
            f'</div><div class="cdp-plot cdp-charts" {plot}>',
            _chart_names(),
            _charts(analysis, scale, frame),
            "</div></div>",
        ]
    )


def _row_names(schedule: Schedule, n_rows: int, scale: _Scale) -> str:
    what = "mb" if schedule.one_device else "rank"
    size = min(11.0, scale.row - 2)
    names = "".join(
        text(f"{what} {row}", _GUTTER - 6, (row + 0.5) * scale.row + size * 0.35, font_size=size)
        for row in range(n_rows)
    )
    height = n_rows * scale.row
    return drawing(names, _GUTTER, height, "rows", class_="cdp-names", aria_hidden="true")


def _grid(program: Program, scale: _Scale, frame: Frame) -> str:
    tick, hover = program.schedule.timing.ticks_per_slot, texts(program)
    what, n_rows = rows(program.schedule.layout)
    delays = {step: program.schedule.delays(step) for step in program.steps}
    by_row: list[list[tuple[int, str, str]]] = [[] for _ in range(n_rows)]
    for rank, instructions in enumerate(program.ranks):
        for k, i in enumerate(instructions):
            if i.action.computes:
                microbatch = i.microbatch or 0
                stale = delays[i.step or 0][i.stage][microbatch] > 0
                cell = _cell(i, i.tick / tick, stale, hover[rank, k], scale)
                row = row_of(program.schedule.layout, rank, microbatch)
                by_row[row].append((i.tick, i.label, cell))
    groups = []
    for row, cells in enumerate(by_row):
        cells.sort(key=lambda cell: cell[0])
        said = f"{what} {row}: {' '.join(label for _, label, _ in cells)}"
        groups.append(
            f'<g class="cdp-row" tabindex="0" role="group" aria-label="{said}"'
            f' transform="translate(0 {number(row * scale.row)})">'
            f"{''.join(cell for _, _, cell in cells)}</g>"
        )
    label = f"{program.schedule.name}: ops of {len(program.steps)} training steps"
    width, height = (frame.slots + 1) * scale.slot, n_rows * scale.row
    lines = _step_lines(program, scale, height)
    size = number(scale.font)
    content = lines + "".join(groups)
    return drawing(content, width, height, label, class_="cdp-grid", role="group", font_size=size)


def _cell(i: Instruction, slot: float, stale: bool, hover: str, scale: _Scale) -> str:
    """An op: its stage, on its colour; a bar below where it reads stale weights."""
    x, w, h = slot * scale.slot, scale.slot, scale.row
    y = h * 0.5 + scale.font * 0.36 - (1.5 if stale else 0)
    bar = f'<path d="M{number(x + 0.2 * w)} {number(h - 3)}h{number(0.6 * w)}"/>' if stale else ""
    return (
        f'<g class="cdp-{_CLASS[i.action]} cdp-s{(i.step or 0) % 3}" tabindex="-1">'
        f"<title>{escape(hover, quote=False)}</title>"
        f'<rect x="{number(x + 0.5)}" y="1" width="{number(w - 1)}" height="{number(h - 2)}"/>'
        f'<text x="{number(x + w / 2)}" y="{number(y)}">{i.stage}</text>{bar}</g>'
    )


def _step_lines(program: Program, scale: _Scale, height: float) -> str:
    """Where training steps start."""
    period = program.schedule.period * scale.slot
    starts = (number(k * period) for k in range(1, len(program.steps)))
    path = "".join(f"M{x} 0V{number(height)}" for x in starts)
    return element("path", d=path, class_="cdp-step")


_CHARTS = ("activations", "sent")


def _chart_names() -> str:
    names = ""
    for k, what in enumerate(_CHARTS):
        names += text(what, _GUTTER - 6, _AXIS + (k + 0.5) * _CHART + _ROOM / 2, font_size=11)
    names += text("slot", _GUTTER - 6, 13, font_size=11)
    height = _AXIS + len(_CHARTS) * _CHART + 2
    return drawing(names, _GUTTER, height, "axes", class_="cdp-names", aria_hidden="true")


def _charts(analysis: Analysis, scale: _Scale, frame: Frame) -> str:
    sent, alive, most = analysis.traffic, analysis.activations, analysis.most_sent
    peak = f"peak {float(analysis.peak):.4g} micro-batches"
    busiest = f"most {float(most):.4g} stage-parameters a slot"
    parts = [
        _slot_numbers(frame.slots, scale),
        _chart(0, alive, analysis.peak, frame.activations, "cdp-memory", peak, scale),
        _chart(1, sent, most, frame.sent, "cdp-traffic", busiest, scale),
    ]
    label = f"activations of all ranks: {peak}; sent by all ranks: {busiest}"
    width = (frame.slots + 1) * scale.slot
    height = _AXIS + len(_CHARTS) * _CHART + 2
    return drawing("".join(parts), width, height, label, role="img", class_="cdp-chart")


def _slot_numbers(n_slots: int, scale: _Scale) -> str:
    every = next(k for k in (1, 2, 5, 10, 20, 50, 100) if k * scale.slot >= 26)
    return "".join(
        text(str(slot), (slot + 0.5) * scale.slot, 13, class_="cdp-slot")
        for slot in range(0, n_slots, every)
    )


def _chart(
    k: int,
    values: Sequence[Fraction],
    line: Fraction,
    largest: Fraction,
    css: str,
    label: str,
    scale: _Scale,
) -> str:
    """One chart: a filled curve, and a line at the most of the steady state."""
    zero = _AXIS + (k + 1) * _CHART
    unit = (_CHART - _ROOM - 6) / (float(largest) or 1.0)
    width = len(values) * scale.slot
    level = zero - float(line) * unit
    curve = element("path", d=steps([*map(float, values)], scale.slot, zero, unit), class_=css)
    base = element("path", d=f"M0 {number(zero)}H{number(width)}", class_="cdp-base")
    mark = element("path", d=f"M0 {number(level)}H{number(width)}", class_="cdp-most")
    return curve + base + mark + text(label, 3, level - 3, class_="cdp-value")


def element(tag: str, content: str = "", **attributes: object) -> str:
    """``<tag ...>content</tag>``; ``class_`` is class and ``aria_label`` is aria-label."""
    words = [tag, *(f'{_name(k)}="{escape(str(v))}"' for k, v in attributes.items())]
    return f"<{' '.join(words)}>{content}</{tag}>"


def text(content: str, x: float, y: float, **attributes: object) -> str:
    return element("text", escape(content), x=number(x), y=number(y), **attributes)


def drawing(content: str, width: float, height: float, label: str, **attributes: object) -> str:
    """An image with a text alternative, that grows and shrinks with those beside it."""
    return element(
        "svg",
        content,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        style=f"flex:{number(width)} 1 {number(width)}px",
        aria_label=label,
        **attributes,
    )


def steps(values: Sequence[float], width: float, y_of_zero: float, scale: float) -> str:
    """The path of a curve that is constant in each of equal intervals, closed at zero."""
    words = [f"M0 {number(y_of_zero)}"]
    for k, value in enumerate(values):
        words.append(f"V{number(y_of_zero - value * scale)}H{number((k + 1) * width)}")
    return "".join([*words, f"V{number(y_of_zero)}Z"])


def table(rows: Iterable[Sequence[str]], **attributes: object) -> str:
    """Rows of cells, which are HTML already."""
    return element("table", "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows), **attributes)


def number(value: float) -> str:
    """Without needless digits: there are thousands of them."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")

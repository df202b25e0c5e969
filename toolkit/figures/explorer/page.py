"""The explorer's page: drawings, key numbers and messages as HTML without script or network."""

from collections.abc import Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

from toolkit.figures.explorer.choice import Choice
from toolkit.figures.explorer.inspection import Analysis, Number, texts
from toolkit.figures.schedule_figure import Cell, cells
from toolkit.schedule import Action, Schedule
from toolkit.schedule.grid import rows

if TYPE_CHECKING:
    from toolkit.cost import Timeline

LEGEND = (
    '<div class="cdp-legend"><span><i class="cdp-key-forward"></i>forward</span>'
    '<span><i class="cdp-key-backward"></i>backward</span>'
    '<span><i class="cdp-key-weight"></i>backward of weights</span>'
    '<span><i class="cdp-key-stale"></i>reads stale weights</span>'
    "<span>deeper colour: later step; point at an op for what it waits for and frees</span></div>"
)
_CLASS = {Action.FORWARD: "f", Action.BACKWARD_WEIGHT: "w"}  # others are "b"
# Pixels
_AXIS = 18  # numbers of slots
_CHART, _ROOM = 84, 22  # a chart; its part above the largest value, for a label
_GUTTER = 74  # left of the slots
_WIDE, _NARROW = 740.0, 340.0  # for the slots, of one drawing and of two side by side
_ONE_DIGIT, _TWO_DIGITS, _LARGEST = 8.0, 13.0, 36.0  # of a slot: at least, and at most
_GROWTH = 1.35  # most that a drawing grows where there is room


class Frame(NamedTuple):
    """The common scale of drawings side by side; the last two are the tops of the charts."""

    slots: int
    slot: float  # pixels
    activations: float  # micro-batches
    sent: float  # stage-parameters


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


def panes(shown: "Sequence[tuple[Analysis, Timeline]]", *, in_slots: bool) -> list[str]:
    """For each schedule its name, key numbers, staleness and drawing, all on the same scales."""
    frame = frame_of([analysis for analysis, _ in shown])
    return [
        f'<h3>{escape(analysis.schedule.name)}</h3><div class="cdp-facts">'
        f"{_numbers(analysis.numbers(timeline, in_slots=in_slots))}"
        f"{_staleness(analysis.schedule)}</div>{draw(analysis, frame)}"
        for analysis, timeline in shown
    ]


def _numbers(numbers: Sequence[Number]) -> str:
    lines = (
        f'<tr><th scope="row" title="{escape(n.meaning)}">{n.name}</th>'
        f'<td class="cdp-number">{n.value}</td><td class="cdp-unit">{n.unit}</td></tr>'
        for n in numbers
    )
    return f'<table class="cdp-numbers" aria-label="key numbers">{"".join(lines)}</table>'


def _staleness(schedule: Schedule) -> str:
    most, where = max(1, schedule.max_staleness), "stages down, micro-batches across"
    small = " cdp-small" if max(schedule.n_stages, schedule.n_microbatches) > 8 else ""
    head = "".join(f'<th scope="col">{m}</th>' for m in range(schedule.n_microbatches))
    lines = [f"<tr><th></th>{head}</tr>"]
    for j, row in enumerate(schedule.staleness):
        shades = [f"background:rgba(213,94,0,{0.45 * late / most:.2f})" for late in row]
        found = (f'<td style="{s}">{late}</td>' for s, late in zip(shades, row, strict=True))
        lines.append(f'<tr><th scope="row">{j}</th>{"".join(found)}</tr>')
    return (
        f'<div class="cdp-matrix"><div>staleness</div><table class="cdp-staleness{small}"'
        f' aria-label="staleness, {where}">{"".join(lines)}</table><div>{where}</div></div>'
    )


@lru_cache(maxsize=32)
def draw(analysis: Analysis, frame: Frame) -> str:
    """A program as SVG: its grid, and below it over the same slots its activations and traffic."""
    schedule, n_rows = analysis.schedule, rows(analysis.schedule.layout)[1]
    row = 22.0 if n_rows <= 12 else 16.0 if n_rows <= 32 else 12.0
    width, grid = _GUTTER + (frame.slots + 1) * frame.slot, n_rows * row
    height = grid + _AXIS + 2 * _CHART + 2
    short = "mb" if schedule.one_device else "rank"
    names = {(k + 0.5) * row + 4: f"{short} {k}" for k in range(n_rows)}
    names |= {grid + 13: "slot", grid + 0.8 * _CHART: "activations", grid + 1.8 * _CHART: "sent"}
    labels = "".join(
        f'<text x="-6" y="{y:g}" class="cdp-name">{name}</text>' for y, name in names.items()
    )
    title = f"{schedule.name}: ops of {len(analysis.drawn.steps)} training steps"
    return (
        f'<div class="cdp-scroll" role="group" tabindex="0" aria-label="{escape(schedule.name)}:'
        ' grid, activations and traffic"><svg xmlns="http://www.w3.org/2000/svg" role="group"'
        f' class="cdp-grid" aria-label="{escape(title)}"'
        f' viewBox="-{_GUTTER} 0 {width:g} {height:g}"'
        f' style="min-width:{width:g}px;max-width:{width * _GROWTH:g}px">'
        f'{labels}{_grid(analysis, row, frame)}<g transform="translate(0 {grid:g})">'
        f"{_charts(analysis, frame)}</g></svg></div>"
    )


def _grid(analysis: Analysis, height: float, frame: Frame) -> str:
    program, slot = analysis.drawn, frame.slot
    what, n_rows = rows(analysis.schedule.layout)
    font = min(12.0, height - 4, slot * (0.85 if analysis.schedule.n_stages <= 10 else 0.66))
    starts = (k * analysis.schedule.period * slot for k in range(1, len(program.steps)))
    lines = "".join(f"M{x:g} 0V{n_rows * height:g}" for x in starts)  # between training steps
    drawn = [f'<path d="{lines}" class="cdp-step"/>']
    by_row: list[list[Cell]] = [[] for _ in range(n_rows)]
    for cell in sorted(cells(program), key=lambda cell: cell.slot):
        by_row[cell.row].append(cell)
    hover = texts(program)
    for k, found in enumerate(by_row):
        drawn.append(
            f'<g class="cdp-row" tabindex="0" role="group" font-size="{font:g}"'
            f' aria-label="{what} {k}: {" ".join(cell.instruction.label for cell in found)}"'
            f' transform="translate(0 {k * height:g})">'
        )
        for start, _, stale, i in found:
            x, y = start * slot, height * 0.5 + font * 0.36 - (1.5 if stale else 0)
            bar = f'<path d="M{x + 0.2 * slot:g} {height - 3:g}h{0.6 * slot:g}"/>' if stale else ""
            drawn.append(
                f'<g class="cdp-{_CLASS.get(i.action, "b")} cdp-s{(i.step or 0) % 3}">'
                f'<title>{escape(hover[i], quote=False)}</title><rect x="{x + 0.5:g}" y="1"'
                f' width="{slot - 1:g}" height="{height - 2:g}"/>'
                f'<text x="{x + slot / 2:g}" y="{y:g}">{i.stage}</text>{bar}</g>'
            )
        drawn.append("</g>")
    return "".join(drawn)


def _charts(analysis: Analysis, frame: Frame) -> str:
    slot = frame.slot
    every = next(k for k in (1, 2, 5, 10, 20, 50, 100) if k * slot >= 26)
    parts = [
        f'<text x="{(k + 0.5) * slot:g}" y="13" class="cdp-slot">{k}</text>'
        for k in range(0, frame.slots, every)
    ]
    peak, most = analysis.peak, analysis.most_sent
    for k, (css, values, level, largest, label) in enumerate(
        (
            ("memory", analysis.activations, peak, frame.activations, "peak {:.4g} micro-batches"),
            ("traffic", analysis.traffic, most, frame.sent, "most {:.4g} stage-parameters a slot"),
        )
    ):
        zero, width = _AXIS + (k + 1) * _CHART, len(values) * slot
        unit = (_CHART - _ROOM) / (largest or 1.0)
        top = zero - level * unit
        parts.append(
            f'<path d="{steps(values, slot, zero, unit)}" class="cdp-{css}"/>'
            f'<path d="M0 {zero:g}H{width:g}" class="cdp-base"/>'
            f'<path d="M0 {top:g}H{width:g}" class="cdp-most"/>'
            f'<text x="3" y="{top - 3:g}" class="cdp-value">{label.format(level)}</text>'
        )
    return "".join(parts)


def steps(values: Sequence[float], width: float, y_of_zero: float, scale: float) -> str:
    """Path of a curve that is constant in each of equal intervals, closed at zero."""
    words = [f"M0 {y_of_zero:g}"]
    for k, value in enumerate(values):
        words.append(f"V{y_of_zero - value * scale:g}H{(k + 1) * width:g}")
    return "".join([*words, f"V{y_of_zero:g}Z"])


def message(error: Exception) -> str:
    """What is wrong, in one sentence, and the grid that shows where."""
    sentence, _, grid = str(error).partition("\n")
    below = f"<pre>{escape(grid)}</pre>" if grid else ""
    return f'<div class="cdp-wrong" role="alert"><p>{escape(sentence)}</p>{below}</div>'


def lines(choice: Choice) -> str:
    """The choice as two lines of text to copy."""
    return "".join(
        f'<label class="cdp-line"><span>{name}</span><input readonly value="{escape(value)}"'
        f' aria-label="{name}: the schedule as text to copy" onfocus="this.select()"></label>'
        for name, value in (("Python", choice.python()), ("overrides", choice.overrides()))
    )


def side_by_side(parts: Sequence[str]) -> str:
    """Panes side by side, or one below another on a narrow page, with style and legend."""
    css = resources.files(__package__).joinpath("explorer.css").read_text(encoding="utf-8")
    inside = "".join(f'<div class="cdp-pane">{part}</div>' for part in parts)
    return f'<style>{css}</style><div class="cdp-panes">{inside}</div>{LEGEND}'


def standalone(title: str, body: str) -> str:
    """A whole document."""
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'</head><body style="margin:16px">{body}</body></html>'
    )

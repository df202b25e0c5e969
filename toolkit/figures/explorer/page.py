"""The explorer's drawings and key numbers as HTML without script or network."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toolkit.figures.explorer.inspection import Analysis, texts
from toolkit.figures.schedule_figure import Cell, cells
from toolkit.schedule.grid import rows

if TYPE_CHECKING:
    from toolkit.cost import Timeline

# Pixels
_WIDE, _NARROW = 740.0, 340.0  # for the slots, of one drawing and of two side by side
_ONE_DIGIT, _TWO_DIGITS, _LARGEST = 8.0, 13.0, 36.0  # of a slot: at least, and at most
_CURVE = 62.0  # of the largest value in a chart


def _macros() -> Any:
    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.undefined = StrictUndefined  # an attribute that is gone raises
    environment.filters["px"] = "{:g}".format
    return environment.get_template("explorer.html").module


HTML = _macros()
"""The macros of ``explorer.html``; they escape all text."""


class Frame(NamedTuple):
    """The common scale of drawings side by side; the last two are the tops of the charts."""

    slots: int
    slot: float  # pixels
    activations: float  # micro-batches
    sent: float  # stage-parameters

    @property
    def numbered(self) -> int:
        """Slots from one number to the next, so that each has room."""
        return next(k for k in (1, 2, 5, 10, 20, 50, 100) if k * self.slot >= 26)


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
        HTML.pane(analysis, analysis.numbers(timeline, in_slots=in_slots), draw(analysis, frame))
        for analysis, timeline in shown
    ]


@lru_cache(maxsize=32)
def draw(analysis: Analysis, frame: Frame) -> str:
    """A program as SVG: its grid, and below it over the same slots its activations and traffic."""
    row_name, n_rows = rows(analysis.schedule.layout)
    by_row: list[list[Cell]] = [[] for _ in range(n_rows)]
    for cell in sorted(cells(analysis.drawn), key=lambda cell: cell.slot):
        by_row[cell.row].append(cell)
    height = 22.0 if n_rows <= 12 else 16.0 if n_rows <= 32 else 12.0
    digit = 0.85 if analysis.schedule.n_stages <= 10 else 0.66  # of a slot
    font = min(12.0, height - 4, frame.slot * digit)
    charts = []
    for kind, name, values, level, top, label in (
        ("memory", "activations", analysis.activations, analysis.peak, frame.activations,
         "peak {:.4g} micro-batches"),
        ("traffic", "sent", analysis.traffic, analysis.most_sent, frame.sent,
         "most {:.4g} stage-parameters a slot"),
    ):  # fmt: skip
        scale = _CURVE / (top or 1.0)
        chart = {"kind": kind, "name": name, "level": level * scale, "label": label.format(level)}
        path, width = steps(values, frame.slot, scale), len(values) * frame.slot
        charts.append({**chart, "path": path, "width": width})
    hover = texts(analysis.drawn)
    return HTML.drawing(analysis, frame, row_name, by_row, hover, height, font, charts)


def steps(values: Sequence[float], width: float, scale: float) -> str:
    """Path of a curve that is constant in each of equal intervals, closed at zero."""
    parts = (f"V{-value * scale:g}H{k * width:g}" for k, value in enumerate(values, 1))
    return f"M0 0{''.join(parts)}V0Z"

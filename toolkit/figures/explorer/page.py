"""The explorer's drawings and key numbers as HTML that needs no network and no kernel."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toolkit.cost import Timeline
from toolkit.figures.explorer.inspection import Analysis, texts, waits
from toolkit.figures.explorer.picture import Curve, Picture, Placed, in_seconds, in_slots
from toolkit.schedule.grid import rows

# Pixels
_WIDE, _NARROW = 740.0, 340.0  # for the slots, of one drawing and of two side by side
_ONE_DIGIT, _TWO_DIGITS, _LARGEST = 8.0, 13.0, 36.0  # of a cell: at least, and at most
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

    end: float  # slots or seconds
    scale: float  # pixels of one
    cell: float  # pixels of a cell, the median
    rows: int
    memory: float
    sent: float


def frame_of(shown: Sequence[Picture]) -> Frame:
    """Return the common frame of drawings side by side; an empty frame without drawings."""
    if not shown:
        return Frame(0.0, 1.0, 1.0, 0, 0.0, 0.0)
    end = max(picture.end for picture in shown)
    width = _WIDE if len(shown) == 1 else _NARROW
    two_digits = max(picture.analysis.schedule.n_stages for picture in shown) > 10
    min_cell = _TWO_DIGITS if two_digits else _ONE_DIGIT
    cell_length = min(
        median(placed.end - placed.start for placed in picture.cells) for picture in shown
    )
    is_in_slots = shown[0].in_slots
    scale = width / (end + 1) if is_in_slots else width / end
    max_cell = _LARGEST if is_in_slots else 3 * width / end * cell_length
    cell_width = min(max_cell, max(min_cell, scale * cell_length))
    chart_tops = [
        max(max(chart.level, *(value for _, value in chart.curve)) for chart in charts_of_kind)
        for charts_of_kind in zip(*(picture.charts for picture in shown), strict=True)
    ]
    n_rows = max(picture.n_rows for picture in shown)
    return Frame(end, cell_width / cell_length, cell_width, n_rows, chart_tops[0], chart_tops[1])


def pictures_of(shown: Sequence[tuple[Analysis, Timeline]], *, by_slots: bool) -> list[Picture]:
    """Return the pictures of schedules, over slots or over seconds."""
    return [
        in_slots(analysis) if by_slots else in_seconds(analysis, timeline)
        for analysis, timeline in shown
    ]


def pane(analysis: Analysis, timeline: Timeline, picture: Picture, frame: Frame) -> str:
    """Return a schedule's name, key numbers, staleness and drawing as HTML."""
    numbers = analysis.numbers(timeline, in_slots=picture.in_slots)
    return HTML.pane(analysis, numbers, draw(picture, frame))


@lru_cache(maxsize=32)
def draw(picture: Picture, frame: Frame) -> str:
    """Return a program as SVG: its grid, and below it over the same time its memory and traffic."""
    schedule = picture.analysis.schedule
    row_name, n_rows = rows(schedule.layout)
    by_row: list[list[Placed]] = [[] for _ in range(n_rows)]
    numbers: dict[Any, int] = {}
    for cell in sorted(picture.cells, key=lambda cell: cell.start):
        by_row[cell.row].append(cell)
        numbers[cell.instruction] = len(numbers)
    awaited_numbers = {
        instruction: " ".join(
            str(numbers[awaited]) for awaited in awaited_ops if awaited in numbers
        )
        for instruction, awaited_ops in waits(picture.program).items()
    }
    height = 22.0 if frame.rows <= 12 else 16.0 if frame.rows <= 32 else 12.0
    digit_width = 0.85 if schedule.n_stages <= 10 else 0.66  # of a cell
    font_size = min(12.0, height - 4, frame.cell * digit_width)
    charts = []
    for chart, top in zip(picture.charts, (frame.memory, frame.sent), strict=True):
        scale = _CURVE / (top or 1.0)
        path = steps(chart.curve, picture.end, frame.scale, scale)
        charts.append({**chart._asdict(), "level": chart.level * scale, "path": path})
    hover = texts(picture.program)
    drawing_arguments = picture, frame, row_name, by_row, numbers, awaited_numbers
    return HTML.drawing(*drawing_arguments, hover, height, font_size, charts)


def steps(curve: Curve, end: float, width: float, scale: float) -> str:
    """Return the SVG path of a step function until ``end``, closed at zero.

    Args:
        curve: times, and the values from then on.
        end: when the last value ends, in the unit of the times.
        width: pixels of a unit of time.
        scale: pixels of a unit of the values.
    """
    end_times = [time for time, _ in curve[1:]] + [end]
    segments = (
        f"V{-value * scale:.5g}H{end_time * width:.5g}"
        for (_, value), end_time in zip(curve, end_times, strict=True)
    )
    return f"M0 0{''.join(segments)}V0Z"

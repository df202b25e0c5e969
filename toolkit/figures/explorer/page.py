"""The explorer's drawings and key numbers as HTML that needs no network and no kernel."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from toolkit.cost import Timeline
from toolkit.figures.explorer.inspection import Analysis
from toolkit.figures.explorer.op_texts import texts, waits
from toolkit.figures.explorer.picture import (
    Curve,
    Picture,
    Placed,
    in_seconds,
    in_slots,
)
from toolkit.schedule import Instruction
from toolkit.schedule.grid import rows

# Pixels
_WIDE = 740.0  # for the slots of one drawing
_NARROW = 340.0  # for those of two side by side
_ONE_DIGIT = 8.0  # of a cell at least
_TWO_DIGITS = 13.0
_LARGEST = 36.0  # of a cell at most
_CURVE = 62.0  # of the largest value in a chart


def _macros() -> Any:
    files = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=files, autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
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


def frame_of(pictures: Sequence[Picture]) -> Frame:
    """Return the common frame of drawings side by side; an empty frame without drawings."""
    if not pictures:
        return Frame(end=0.0, scale=1.0, cell=1.0, rows=0, memory=0.0, sent=0.0)
    end = max(picture.end for picture in pictures)
    width = _WIDE if len(pictures) == 1 else _NARROW
    cell_length = min(map(_median_cell, pictures))
    # Slots are as wide as the drawing allows, up to `_LARGEST`. A drawing in seconds may be
    # stretched for the numbers in its cells, to three times its width at most.
    if pictures[0].in_slots:
        scale = width / (end + 1)
        max_cell = _LARGEST
    else:
        scale = width / end
        max_cell = 3 * scale * cell_length
    n_stages = max(picture.analysis.schedule.n_stages for picture in pictures)
    min_cell = _TWO_DIGITS if n_stages > 10 else _ONE_DIGIT
    cell_width = min(max_cell, max(min_cell, scale * cell_length))
    return Frame(
        end=end,
        scale=cell_width / cell_length,
        cell=cell_width,
        rows=max(picture.n_rows for picture in pictures),
        memory=max(picture.memory.top for picture in pictures),
        sent=max(picture.traffic.top for picture in pictures),
    )


def _median_cell(picture: Picture) -> float:
    """Return the length of an op, in slots or seconds."""
    return median(placed.end - placed.start for placed in picture.cells)


def pictures_of(
    results: Sequence[tuple[Analysis, Timeline]], *, by_slots: bool
) -> list[Picture]:
    """Return the pictures of schedules, over slots or over seconds."""
    if by_slots:
        return [in_slots(analysis) for analysis, _ in results]
    return [in_seconds(analysis, timeline) for analysis, timeline in results]


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
    numbers: dict[Instruction, int] = {}
    # Numbers in the order of time are the ids by which an op finds those that it waits for.
    for cell in sorted(picture.cells, key=lambda cell: cell.start):
        by_row[cell.row].append(cell)
        numbers[cell.instruction] = len(numbers)
    awaited_numbers = {}
    for instruction, awaited_ops in waits(picture.program).items():
        drawn_ops = [awaited for awaited in awaited_ops if awaited in numbers]
        awaited_numbers[instruction] = " ".join(
            str(numbers[awaited]) for awaited in drawn_ops
        )
    reasons = picture.reasons()
    hover = {
        instruction: f"{text}\n{reasons.get(instruction, '')}".strip()
        for instruction, text in texts(picture.program).items()
    }
    height = 22.0
    if frame.rows > 12:
        height = 16.0
    if frame.rows > 32:
        height = 12.0
    digit_width = 0.85 if schedule.n_stages <= 10 else 0.66  # of a cell
    charts = []
    for chart, top in ((picture.memory, frame.memory), (picture.traffic, frame.sent)):
        # A chart without any value is flat.
        scale = _CURVE / (top or 1.0)
        path = steps(chart.curve, picture.end, frame.scale, scale)
        charts.append({**chart._asdict(), "level": chart.level * scale, "path": path})
    return HTML.drawing(
        picture,
        frame,
        row_name,
        rows=by_row,
        numbers=numbers,
        before=awaited_numbers,
        hover=hover,
        height=height,
        font=min(12.0, height - 4, frame.cell * digit_width),
        charts=charts,
    )


def steps(curve: Curve, end: float, width: float, scale: float) -> str:
    """Return the SVG path of a step function until ``end``, closed at zero.

    Args:
        curve: times, and the values from then on.
        end: when the last value ends, in the unit of the times.
        width: pixels of a unit of time.
        scale: pixels of a unit of the values.
    """
    # Commands of SVG: M moves, V draws to a height, H draws to a time; y points down. For values 3
    # and 1:
    #
    #     M0 0 V-3 H1 V-1 H2 V0 Z         ___
    #                                    |   |___
    #                                    |_______|
    path = "M0 0"
    end_times = [time for time, _ in curve[1:]] + [end]
    for (_, value), end_time in zip(curve, end_times, strict=True):
        path += f"V{-value * scale:.5g}H{end_time * width:.5g}"
    return f"{path}V0Z"

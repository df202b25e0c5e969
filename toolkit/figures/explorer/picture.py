"""What a pane draws: ops in their places, memory and traffic, over slots or over seconds."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log10
from typing import NamedTuple

from toolkit.cost import Timeline
from toolkit.cost.timeline import COMPUTE, SEND
from toolkit.figures.explorer.inspection import Analysis
from toolkit.figures.schedule_figure import cells
from toolkit.format import RATES, TIMES, digits, size, unit_for
from toolkit.schedule import Instruction, Program
from toolkit.schedule.grid import rows

Curve = Sequence[tuple[float, float]]
"""Values of a step function, each with the time from which on it holds."""


class Placed(NamedTuple):
    """An op in its place: when it begins and ends, its row, and whether it reads late weights."""

    start: float
    end: float
    row: int
    stale: bool
    instruction: Instruction


class Chart(NamedTuple):
    """A curve below the grid, with the level that its label names."""

    kind: str
    name: str
    curve: Curve
    level: float
    label: str


@dataclass(frozen=True, eq=False)
class Picture:
    """A program in its places; times are slots, or seconds where ``in_slots`` is false."""

    analysis: Analysis
    program: Program
    cells: list[Placed]
    charts: tuple[Chart, Chart]
    end: float
    in_slots: bool

    @property
    def n_rows(self) -> int:
        """Rows of the grid."""
        return rows(self.analysis.schedule.layout)[1]

    @property
    def axis(self) -> tuple[float, str]:
        """Unit of the time axis, in slots or seconds, and its name."""
        return (1.0, "slot") if self.in_slots else unit_for(self.end, TIMES)

    def step_starts(self) -> list[float]:
        """Return when each drawn training step except the first begins on the first rank."""
        n_steps = len(self.analysis.drawn.steps)
        step_length = self.analysis.schedule.period if self.in_slots else self.end / n_steps
        return [index * float(step_length) for index in range(1, n_steps)]

    def ticks(self, scale: float) -> Iterator[tuple[float, str]]:
        """Yield places and labels of the time axis; ``scale`` is pixels per slot or second."""
        unit, _ = self.axis
        min_spacing = (26 if self.in_slots else 50) / scale / unit
        spacings = (
            multiple * 10.0**exponent
            for exponent in range(int(log10(min_spacing)) - 2, 99)
            for multiple in (1, 2, 5)
        )
        tick_spacing = next(
            spacing
            for spacing in spacings
            if spacing >= min_spacing and (spacing >= 1 or not self.in_slots)
        )
        offset = 0.5 if self.in_slots else 0.0  # of a slot
        for multiple in range(int(self.end / unit / tick_spacing + 0.999)):
            yield (multiple * tick_spacing + offset) * unit, f"{multiple * tick_spacing:g}"


@lru_cache(maxsize=16)
def in_slots(analysis: Analysis) -> Picture:
    """Return the picture of a program by slots, its memory in micro-batches."""
    placed_ops = [Placed(cell.slot, cell.slot + 1, *cell[1:]) for cell in cells(analysis.drawn)]
    charts = (
        Chart("memory", "activations", [*enumerate(analysis.activations)], analysis.peak,
              f"peak {analysis.peak:.4g} micro-batches"),
        Chart("traffic", "sent", [*enumerate(analysis.traffic)], analysis.most_sent,
              f"most {analysis.most_sent:.4g} stage-parameters a slot"),
    )  # fmt: skip
    drawn = analysis.drawn
    return Picture(analysis, drawn, placed_ops, charts, drawn.n_slots, in_slots=True)


def in_seconds(analysis: Analysis, timeline: Timeline) -> Picture:
    """Return the picture of some steady steps of a timeline: ops, and bytes held and sent.

    The window begins with the first op of a steady step. Ops that reach beyond it are cut.
    """
    n_steps = len(analysis.drawn.steps)
    program = analysis.schedule.lower(len(timeline.step_ends))
    span_of_op = {
        (span.rank, span.name, span.step): span for span in timeline.spans if span.lane == COMPUTE
    }
    first_step = timeline.steady.start if timeline.steady else 0
    window_start = min(span.start for span in span_of_op.values() if span.step == first_step)
    window_length = n_steps * timeline.step_time
    cell_of_instruction = {cell.instruction: cell for cell in cells(program)}
    placed_ops = []
    for rank, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if instruction.action.computes:
                span = span_of_op[rank, str(instruction.op), instruction.step]
                start, end = (
                    max(0.0, span.start - window_start),
                    min(window_length, span.end - window_start),
                )
                if start < end:
                    placed_ops.append(
                        Placed(
                            start,
                            end,
                            cell_of_instruction[instruction].row,
                            cell_of_instruction[instruction].stale,
                            instruction,
                        )
                    )
    held_bytes, sent_rates = timeline.memory(), _rates(timeline)
    peak_bytes, peak_rate = (
        max(value for _, value in held_bytes),
        max(value for _, value in sent_rates),
    )
    unit, unit_name = unit_for(peak_rate, RATES, at_least=1)
    charts = (
        Chart("memory", "memory", _within(held_bytes, window_start, window_length), peak_bytes,
              f"peak {size(peak_bytes)}, all ranks"),
        Chart("traffic", "sent", _within(sent_rates, window_start, window_length), peak_rate,
              f"most {digits(peak_rate / unit)} {unit_name}, all ranks"),
    )  # fmt: skip
    return Picture(analysis, program, placed_ops, charts, window_length, in_slots=False)


def _rates(timeline: Timeline) -> Curve:
    """Return the bytes a second that all ranks send, over time."""
    changes: list[tuple[float, float]] = []
    for span in timeline.spans:
        if span.lane == SEND and span.end > span.start:
            rate = span.bytes / (span.end - span.start)
            changes += [(span.start, rate), (span.end, -rate)]
    rate_now, curve = 0.0, [(0.0, 0.0)]
    for time, change in sorted(changes):
        rate_now += change
        curve.append((time, max(rate_now, 0.0)))  # rounding may go below
    return curve


def _within(curve: Curve, begin: float, length: float) -> Curve:
    """Cut a curve to the window of ``length`` from ``begin`` on, which becomes time 0."""
    earlier_values = [value for time, value in curve if time <= begin]
    later_points = [(time - begin, value) for time, value in curve if begin < time < begin + length]
    return [(0.0, earlier_values[-1]), *later_points]

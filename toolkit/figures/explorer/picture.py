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
        """When each drawn training step but the first begins on the first rank."""
        n_steps = len(self.analysis.drawn.steps)
        step = self.analysis.schedule.period if self.in_slots else self.end / n_steps
        return [k * float(step) for k in range(1, n_steps)]

    def ticks(self, scale: float) -> Iterator[tuple[float, str]]:
        """Yield places and labels of the time axis; ``scale`` is pixels per slot or second."""
        unit, _ = self.axis
        room = (26 if self.in_slots else 50) / scale / unit
        steps = (k * 10.0**n for n in range(int(log10(room)) - 2, 99) for k in (1, 2, 5))
        step = next(s for s in steps if s >= room and (s >= 1 or not self.in_slots))
        middle = 0.5 if self.in_slots else 0.0  # of a slot
        for k in range(int(self.end / unit / step + 0.999)):
            yield (k * step + middle) * unit, f"{k * step:g}"


@lru_cache(maxsize=16)
def in_slots(analysis: Analysis) -> Picture:
    """The picture of a program by slots, its memory in micro-batches."""
    placed = [Placed(c.slot, c.slot + 1, *c[1:]) for c in cells(analysis.drawn)]
    charts = (
        Chart("memory", "activations", [*enumerate(analysis.activations)], analysis.peak,
              f"peak {analysis.peak:.4g} micro-batches"),
        Chart("traffic", "sent", [*enumerate(analysis.traffic)], analysis.most_sent,
              f"most {analysis.most_sent:.4g} stage-parameters a slot"),
    )  # fmt: skip
    drawn = analysis.drawn
    return Picture(analysis, drawn, placed, charts, drawn.n_slots, in_slots=True)


def in_seconds(analysis: Analysis, timeline: Timeline) -> Picture:
    """The picture of some steady steps of a timeline: when ops run, and bytes held and sent."""
    n_steps = len(analysis.drawn.steps)
    program = analysis.schedule.lower(len(timeline.step_ends))
    ran = {(s.rank, s.name, s.step): s for s in timeline.spans if s.lane == COMPUTE}
    first = timeline.steady.start if timeline.steady else 0
    begin = min(span.start for span in ran.values() if span.step == first)
    length = n_steps * timeline.step_time
    of = {cell.instruction: cell for cell in cells(program)}
    placed = []
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action.computes:
                span = ran[rank, str(i.op), i.step]
                start, end = max(0.0, span.start - begin), min(length, span.end - begin)
                if start < end:
                    placed.append(Placed(start, end, of[i].row, of[i].stale, i))
    held, sent = timeline.memory(), _rates(timeline)
    peak, most = max(value for _, value in held), max(value for _, value in sent)
    unit, name = unit_for(most, RATES, at_least=1)
    charts = (
        Chart("memory", "memory", _within(held, begin, length), peak,
              f"peak {size(peak)}, all ranks"),
        Chart("traffic", "sent", _within(sent, begin, length), most,
              f"most {digits(most / unit)} {name}, all ranks"),
    )  # fmt: skip
    return Picture(analysis, program, placed, charts, length, in_slots=False)


def _rates(timeline: Timeline) -> Curve:
    """Bytes a second that all ranks send, over time."""
    changes: list[tuple[float, float]] = []
    for span in timeline.spans:
        if span.lane == SEND and span.end > span.start:
            rate = span.bytes / (span.end - span.start)
            changes += [(span.start, rate), (span.end, -rate)]
    now, found = 0.0, [(0.0, 0.0)]
    for when, change in sorted(changes):
        now += change
        found.append((when, max(now, 0.0)))  # rounding may go below
    return found


def _within(curve: Curve, begin: float, length: float) -> Curve:
    """A curve from ``begin`` on, which becomes 0, for ``length``."""
    before = [value for when, value in curve if when <= begin]
    later = [(when - begin, value) for when, value in curve if begin < when < begin + length]
    return [(0.0, before[-1]), *later]

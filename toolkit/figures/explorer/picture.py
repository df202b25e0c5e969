"""What a pane draws: ops in their places, memory and traffic, over slots or over seconds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log10
from typing import NamedTuple

from toolkit.cost import Timeline
from toolkit.cost.timeline import COMPUTE, SEND
from toolkit.figures.explorer.inspection import Analysis
from toolkit.figures.explorer.op_texts import waits
from toolkit.figures.schedule_figure import cells
from toolkit.format import RATES, TIMES, digits, duration, size, unit_for
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

    @property
    def top(self) -> float:
        """The largest value of the curve, or the level."""
        return max(self.level, *(value for _, value in self.curve))


_NO_GAP = 1e-3  # share of an op between two that touch


@dataclass(frozen=True, eq=False)
class Picture:
    """A program in its places; times are slots, or seconds where ``in_slots`` is false."""

    analysis: Analysis
    program: Program
    cells: list[Placed]
    memory: Chart
    traffic: Chart
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
        # In seconds the window has whole steady steps, which are equally long.
        step_length = (
            self.analysis.schedule.period if self.in_slots else self.end / n_steps
        )
        return [index * float(step_length) for index in range(1, n_steps)]

    def reasons(self) -> dict[Instruction, str]:
        """Return, for each drawn op, a sentence that says why it starts no earlier."""
        place = {placed.instruction: placed for placed in self.cells}
        rank_of: dict[Instruction, int] = {}
        for rank, instructions in enumerate(self.program.ranks):
            rank_of |= dict.fromkeys(instructions, rank)
        sentences: dict[Instruction, str] = {}
        for instruction, awaited_ops in waits(self.program).items():
            awaited = [op for op in awaited_ops if op in place]
            if instruction not in place:
                continue
            if not awaited:
                sentences[instruction] = "It waits for no op in the drawing."
                continue
            # Of all that an op waits for, only the last to end is why it starts no earlier.
            last = max(awaited, key=lambda op: place[op].end)
            sentences[instruction] = _reason(instruction, last, rank_of)
            length = place[instruction].end - place[instruction].start
            if place[instruction].start - place[last].end > _NO_GAP * length:
                gap = place[instruction].start - place[last].end
                sentences[instruction] += f" {self._gap(gap)}"
        return sentences

    def _gap(self, length: float) -> str:
        if self.in_slots:
            return f"The schedule leaves {length:.4g} slots between them."
        return f"Messages and updates take {' '.join(duration(length))} more."

    def ticks(self, scale: float) -> Iterator[tuple[float, str]]:
        """Yield places and labels of the time axis; ``scale`` is pixels per slot or second."""
        unit, _ = self.axis
        # Pixels that a label takes: a number of a slot is shorter than one of seconds.
        min_spacing = (26 if self.in_slots else 50) / scale / unit
        if self.in_slots:
            min_spacing = max(1, min_spacing)
        # Slots have a number in their middle; seconds have one at a moment.
        offset = 0.5 if self.in_slots else 0.0  # the middle of a slot
        spacing = _round_up(min_spacing)
        for multiple in range(int(self.end / unit / spacing + 0.999)):
            yield (multiple * spacing + offset) * unit, f"{multiple * spacing:g}"


def _reason(
    instruction: Instruction, last: Instruction, rank_of: Mapping[Instruction, int]
) -> str:
    """Return why ``instruction`` cannot start before ``last`` has ended."""
    name = f"{last.op} of step {last.step}"
    # The same micro-batch: its input. The same rank: the op before. Else the update of its weights.
    if (last.microbatch, last.step) == (instruction.microbatch, instruction.step):
        return f"It waits for what {name} makes, on rank {rank_of[last]}."
    if rank_of[last] == rank_of[instruction]:
        return f"It waits for its rank, which runs {name} until then."
    return (
        f"It waits for weights {instruction.version} of stage {instruction.stage}: their last"
        f" gradient is that of {name}, on rank {rank_of[last]}."
    )


def _round_up(spacing: float) -> float:
    """Return the least of 1, 2 or 5 times a power of ten that is at least ``spacing``."""
    # Two below, since int() rounds towards 0: the search goes upwards from a safe begin.
    exponent = int(log10(spacing)) - 2
    while True:
        for multiple in (1, 2, 5):
            if multiple * 10.0**exponent >= spacing:
                return multiple * 10.0**exponent
        exponent += 1


@lru_cache(maxsize=16)
def in_slots(analysis: Analysis) -> Picture:
    """Return the picture of a program by slots, its memory in micro-batches."""
    placed_ops = []
    for slot, row, stale, instruction in cells(analysis.drawn):
        placed_ops.append(Placed(slot, slot + 1, row, stale, instruction))
    memory_label = f"peak {analysis.peak:.4g} micro-batches"
    traffic_label = f"most {analysis.most_sent:.4g} stage-parameters a slot"
    activations = [*enumerate(analysis.activations)]
    traffic = [*enumerate(analysis.traffic)]
    return Picture(
        analysis,
        analysis.drawn,
        placed_ops,
        memory=Chart("memory", "activations", activations, analysis.peak, memory_label),
        traffic=Chart("traffic", "sent", traffic, analysis.most_sent, traffic_label),
        end=analysis.drawn.n_slots,
        in_slots=True,
    )


def in_seconds(analysis: Analysis, timeline: Timeline) -> Picture:
    """Return the picture of some steady steps of a timeline: ops, and bytes held and sent.

    The window begins with the first op of a steady step. Ops that reach beyond it are cut.
    """
    window = _steady_window(timeline, n_steps=len(analysis.drawn.steps))
    # Longer than the drawn program: steady steps begin later where messages take time.
    program = analysis.schedule.lower(len(timeline.step_ends))
    memory = timeline.memory()
    peak = max(n_bytes for _, n_bytes in memory)
    rates = _rates(timeline)
    fastest = max(rate for _, rate in rates)
    unit, unit_name = unit_for(fastest, RATES, at_least=1)
    of = "all ranks" if analysis.width == 1 else "a device of each rank"
    memory_label = f"peak {size(peak)}, {of}"
    traffic_label = f"most {digits(fastest / unit)} {unit_name}, {of}"
    return Picture(
        analysis,
        program,
        _placed_in(window, program, timeline),
        memory=Chart("memory", "memory", window.cut(memory), peak, memory_label),
        traffic=Chart("traffic", "sent", window.cut(rates), fastest, traffic_label),
        end=window.length,
        in_slots=False,
    )


class _Window(NamedTuple):
    """The part of a timeline that is drawn; its start becomes time 0."""

    start: float
    length: float

    def cut(self, curve: Curve) -> Curve:
        """Return the part of a curve within the window."""
        # The curve holds its last value from before the window.
        earlier_values = [value for time, value in curve if time <= self.start]
        points = [(0.0, earlier_values[-1])]
        for time, value in curve:
            if self.start < time < self.start + self.length:
                points.append((time - self.start, value))
        return points


def _steady_window(timeline: Timeline, n_steps: int) -> _Window:
    """Return the window of ``n_steps`` steps from the first op of a steady one on."""
    first_step = timeline.steady.start if timeline.steady else 0
    starts = [
        span.start
        for span in timeline.spans
        if span.lane == COMPUTE and span.step == first_step
    ]
    return _Window(min(starts), n_steps * timeline.step_time)


def _placed_in(window: _Window, program: Program, timeline: Timeline) -> list[Placed]:
    """Return the ops that run in the window, those that reach beyond it cut."""
    span_of_op = {
        (span.rank, span.name, span.step): span
        for span in timeline.spans
        if span.lane == COMPUTE
    }
    cell_of_instruction = {cell.instruction: cell for cell in cells(program)}
    placed_ops = []
    for rank, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if instruction.action.computes:
                span = span_of_op[rank, str(instruction.op), instruction.step]
                start = max(0.0, span.start - window.start)
                end = min(window.length, span.end - window.start)
                if start < end:
                    cell = cell_of_instruction[instruction]
                    placed_ops.append(
                        Placed(start, end, cell.row, cell.stale, instruction)
                    )
    return placed_ops


def _rates(timeline: Timeline) -> Curve:
    """Return the bytes a second that all ranks send, over time."""
    changes: list[tuple[float, float]] = []
    for span in timeline.spans:
        if span.lane == SEND and span.end > span.start:
            rate = span.bytes / (span.end - span.start)
            changes += [(span.start, rate), (span.end, -rate)]
    rate = 0.0
    curve = [(0.0, 0.0)]
    # At equal times ends come first, with negative rates, so that no false peak appears.
    for time, change in sorted(changes):
        rate += change
        curve.append((time, max(rate, 0.0)))  # rounding may go below
    return curve

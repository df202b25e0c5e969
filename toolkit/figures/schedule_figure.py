"""Schedules as grids, over their activation memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from toolkit.errors import UserError
from toolkit.figures.style import BLACK, BLUE, ORANGE, SKY, YELLOW, align, drawing
from toolkit.schedule import (
    Action,
    Instruction,
    Phase,
    PhasedSchedule,
    Program,
    Schedule,
)
from toolkit.schedule.grid import row_of, rows

_FILL = {
    Action.FORWARD: SKY,
    Action.BACKWARD: ORANGE,
    Action.BACKWARD_INPUT: ORANGE,
    Action.BACKWARD_WEIGHT: YELLOW,
}
_COLUMN = 3.2  # inches of a schedule
_WIDE = 2.9 * 72  # points of that for its slots
_GRID, _MEMORY, _AROUND = 1.75, 1.15, 0.5  # inches, from top to bottom
_ROW, _TALLEST = 0.13, 6.0  # inches of a row at least, and of a grid at most
_TICKS = 8  # labels of the slots, at most
_LETTERS, _SMALLEST = 5.5, 4.0  # points: in a cell, and where they are left out


class Cell(NamedTuple):
    """An op in its place of the grid: where it starts, and its row."""

    slot: float
    row: int
    stale: bool  # reads late weights
    instruction: Instruction


def schedules(drawn: Schedule | Sequence[Schedule], n_steps: int = 3) -> Figure:
    """Draw one column a schedule: its grid, and below it the activations alive in each slot.

    A row is a rank; where one rank runs several ops at once, a row is a micro-batch. A cell
    bears its stage, where there is room; a bar under it means that it reads weights one step or
    more late. Colour deepens from step to step. Memory is the sum over ranks, in micro-batches:
    1 is all activations of one. Slots and memory have one scale in all columns.

    Args:
        drawn: what is drawn, from left to right.
        n_steps: training steps of each.

    Raises:
        UserError: no schedule, or something else among them.
    """
    drawn = [drawn] if isinstance(drawn, Schedule | str) else [*drawn]
    not_schedules = [
        schedule for schedule in drawn if not isinstance(schedule, Schedule)
    ]
    if not_schedules or not drawn:
        received = repr(not_schedules[0]) if not_schedules else "none"
        raise UserError(
            f"schedules are drawn, such as catalog.cyclic(4): got {received}"
        )
    programs = [_lowered(schedule, n_steps) for schedule in drawn]
    activations = [_activations(program) for program in programs]
    peak = max(map(max, activations))
    grid_shapes = [rows(schedule.layout) for schedule in drawn]
    n_slots = max(program.n_slots for program in programs)
    max_rows = max(n_rows for _, n_rows in grid_shapes)
    grid_height = min(_TALLEST, max(_GRID, _ROW * max_rows))
    with drawing(
        (_COLUMN * len(drawn) + 0.4, grid_height + _MEMORY + _AROUND)
    ) as figure:
        grids, memories = figure.subplots(
            2,
            len(drawn),
            squeeze=False,
            height_ratios=(grid_height, _MEMORY),
            sharex=True,
        )
        for column, program in enumerate(programs):
            _draw_grid(
                grids[column], program, _WIDE / n_slots, 72 * grid_height / max_rows
            )
            grids[column].set_title(program.schedule.name)
            axes = memories[column]
            _draw_memory(axes, activations[column])
            axes.set_ylim(0, 1.2 * peak)
            axes.set_xlabel("slot")
            axes.xaxis.set_major_locator(MultipleLocator(_ticks(drawn[0], n_slots)))
            axes.tick_params(labelleft=column == 0)
        align(grids, grid_shapes)
        memories[0].set_ylabel("activations\n(micro-batches)")
        memories[0].set_xlim(0, n_slots)
        keys = _keys(drawn)
        n_columns = 2 if len(drawn) == 1 and len(keys) > 3 else len(keys)
        figure.legend(handles=keys, loc="outside lower center", ncols=n_columns)
    return figure


def _activations(program: Program) -> list[float]:
    """Return all ranks' activations in each slot, in micro-batches."""
    n_stages = program.schedule.n_stages
    return [live_stages / n_stages for live_stages in program.total_activations()]


def _ticks(schedule: Schedule, n_slots: int) -> float:
    """Return the slots between two labels of the axis: a training step, or several."""
    # Labels fall on the begins of training steps; -(-a // b) rounds up.
    step = max(1, round(schedule.final.period))
    return step * -(-n_slots // step // _TICKS)


def _lowered(schedule: Schedule, n_steps: int) -> Program:
    """Lower a schedule to the program that is drawn; each phase before the last has one step."""
    if isinstance(schedule, PhasedSchedule):
        # A figure of many equal steps shows nothing more, and its cells would be too small.
        phases = tuple(Phase(phase.schedule, 1) for phase in schedule.phases)
        return replace(schedule, phases=phases).lower(n_steps + len(phases) - 1)
    return schedule.lower(n_steps)


def _keys(drawn_schedules: Sequence[Schedule]) -> list[Patch | Line2D]:
    """Return the legend's entries; those that only some schedules need, if one is drawn."""
    keys: list[Patch | Line2D] = [
        Patch(color=SKY, label="forward"),
        Patch(color=ORANGE, label="backward"),
    ]
    if any(schedule.splits_backward for schedule in drawn_schedules):
        keys.append(Patch(color=YELLOW, label="backward of weights"))
    if any(schedule.max_staleness for schedule in drawn_schedules):
        keys.append(
            Line2D([], [], color=BLACK, linewidth=1.5, label="reads stale weights")
        )
    return keys


def cells(program: Program) -> Iterator[Cell]:
    """Yield the ops of ``program`` as cells of its grid."""
    schedule = program.schedule
    ticks_per_slot = schedule.timing.ticks_per_slot
    delays = {step: schedule.delays(step) for step in program.steps}
    for rank, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if instruction.action.computes:
                microbatch = instruction.microbatch or 0
                yield Cell(
                    slot=instruction.tick / ticks_per_slot,
                    row=row_of(schedule.layout, rank, microbatch),
                    stale=delays[instruction.step or 0][instruction.stage][microbatch]
                    > 0,
                    instruction=instruction,
                )


def _draw_grid(axes: Axes, program: Program, width: float, height: float) -> None:
    """Draw the cells, each about ``width`` times ``height`` points."""
    rectangles = []
    fills = []
    bars = []  # below the stage of a cell that reads late weights
    labels = []
    for slot, row, stale, instruction in cells(program):
        # A cell is a slot wide and 0.9 of a row high; rows grow downwards:
        #
        #     row - 0.45    +--------+
        #                   | stage  |
        #     row + 0.34    |  ====  |     the bar of late weights
        #     row + 0.45    +--------+
        start, end, top, bottom = slot, slot + 1, row - 0.45, row + 0.45
        rectangles.append([(start, top), (end, top), (end, bottom), (start, bottom)])
        # Three shades, so that neighbouring training steps always differ.
        opacity = 0.4 + 0.3 * ((instruction.step or 0) % 3)
        fills.append(to_rgba(_FILL[instruction.action], opacity))
        labels.append((slot + 0.5, row, instruction.stage))
        if stale:
            bars.append([(slot + 0.2, row + 0.34), (slot + 0.8, row + 0.34)])
    # White edges would hide cells that are a few points wide.
    edge_width = min(0.6, 0.1 * width, 0.1 * height)
    axes.add_collection(
        PolyCollection(
            rectangles, facecolors=fills, edgecolors="white", linewidths=edge_width
        )
    )
    bar_width = min(1.0, 0.15 * height)
    axes.add_collection(
        LineCollection(bars, colors=BLACK, linewidths=bar_width, capstyle="projecting")
    )
    n_digits = len(str(program.schedule.n_stages - 1))
    # A digit is about 0.64 of its size wide, so that all digits take 0.83 of the cell.
    font_size = min(_LETTERS, 1.3 * width / n_digits, 0.75 * height)
    if font_size >= _SMALLEST:
        for x, y, stage in labels:
            # A text that takes part in the layout would make it slow.
            axes.text(
                x,
                y,
                str(stage),
                ha="center",
                va="center",
                fontsize=font_size,
                in_layout=False,
            )
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_memory(axes: Axes, slot_activations: Sequence[float]) -> None:
    axes.stairs(slot_activations, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(slot_activations, color=BLUE)
    peak = max(slot_activations)
    axes.hlines(
        peak, 0, len(slot_activations), color=BLACK, linewidth=0.6, linestyle=":"
    )
    axes.annotate(
        f"peak {peak:.4g}",
        (len(slot_activations), peak),
        (0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=7,
    )

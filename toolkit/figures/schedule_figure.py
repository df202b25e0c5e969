"""Schedules as grids, over their activation memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MultipleLocator

from toolkit.errors import UserError
from toolkit.figures.style import BLACK, BLUE, ORANGE, SKY, YELLOW, align, drawing
from toolkit.schedule import Action, Instruction, Phase, PhasedSchedule, Program, Schedule
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


def schedules(shown: Schedule | Sequence[Schedule], n_steps: int = 3) -> Figure:
    """Draw one column a schedule: its grid, and below it the activations alive in each slot.

    A row is a rank; where one rank runs several ops at once, a row is a micro-batch. A cell
    bears its stage, where there is room; a bar under it means that it reads weights one step or
    more late. Colour deepens from step to step. Memory is the sum over ranks, in micro-batches:
    1 is all activations of one. Slots and memory have one scale in all columns.

    Args:
        shown: what is drawn, from left to right.
        n_steps: training steps of each.

    Raises:
        UserError: no schedule, or something else among them.
    """
    shown = [shown] if isinstance(shown, Schedule | str) else [*shown]
    not_schedules = [schedule for schedule in shown if not isinstance(schedule, Schedule)]
    if not_schedules or not shown:
        received = repr(not_schedules[0]) if not_schedules else "none"
        raise UserError(f"schedules are drawn, such as catalog.cyclic(4): got {received}")
    programs = [_lowered(schedule, n_steps) for schedule in shown]
    activations = [
        [live_stages / program.schedule.n_stages for live_stages in program.total_activations()]
        for program in programs
    ]
    grid_shapes = [rows(schedule.layout) for schedule in shown]
    n_slots = max(program.n_slots for program in programs)
    max_rows = max(n_rows for _, n_rows in grid_shapes)
    grid_height = min(_TALLEST, max(_GRID, _ROW * max_rows))
    with drawing((_COLUMN * len(shown) + 0.4, grid_height + _MEMORY + _AROUND)) as figure:
        grids, memories = figure.subplots(
            2, len(shown), squeeze=False, height_ratios=(grid_height, _MEMORY), sharex=True
        )
        for program, slot_activations, grid_axes, memory_axes in zip(
            programs, activations, grids, memories, strict=True
        ):
            _draw_grid(grid_axes, program, _WIDE / n_slots, 72 * grid_height / max_rows)
            grid_axes.set_title(program.schedule.name)
            _draw_memory(memory_axes, slot_activations)
            memory_axes.set_ylim(0, 1.2 * max(map(max, activations)))
            memory_axes.set_xlabel("slot")
            memory_axes.xaxis.set_major_locator(MultipleLocator(_ticks(shown[0], n_slots)))
            memory_axes.tick_params(labelleft=memory_axes is memories[0])
        align(grids, grid_shapes)
        memories[0].set_ylabel("activations\n(micro-batches)")
        memories[0].set_xlim(0, n_slots)
        keys = _keys(shown)
        ncols = 2 if len(shown) == 1 and len(keys) > 3 else len(keys)
        figure.legend(handles=keys, loc="outside lower center", ncols=ncols)
    return figure


def _ticks(schedule: Schedule, n_slots: int) -> float:
    """Return the slots between two labels of the axis: a training step, or several."""
    step = max(1, round(schedule.final.period))
    return step * -(-n_slots // step // _TICKS)


def _lowered(schedule: Schedule, n_steps: int) -> Program:
    """Lower a schedule to the program that is drawn; each phase before the last has one step."""
    if isinstance(schedule, PhasedSchedule):
        phases = tuple(Phase(phase.schedule, 1) for phase in schedule.phases)
        schedule, n_steps = replace(schedule, phases=phases), n_steps + len(phases) - 1
    return schedule.lower(n_steps)


def _keys(drawn_schedules: Sequence[Schedule]) -> list[Patch | Line2D]:
    """Return the legend's entries; those that only some schedules need, if one is drawn."""
    fill_of_name = {"forward": SKY, "backward": ORANGE}
    if any(schedule.splits_backward for schedule in drawn_schedules):
        fill_of_name["backward of weights"] = YELLOW
    keys: list[Patch | Line2D] = [
        Patch(color=fill, label=name) for name, fill in fill_of_name.items()
    ]
    if any(schedule.max_staleness for schedule in drawn_schedules):
        keys.append(Line2D([], [], color=BLACK, linewidth=1.5, label="reads stale weights"))
    return keys


def cells(program: Program) -> Iterator[Cell]:
    """Yield the ops of ``program`` as cells of its grid."""
    tick = program.schedule.timing.ticks_per_slot
    layout = program.schedule.layout
    delays = {step: program.schedule.delays(step) for step in program.steps}
    for rank, instructions in enumerate(program.ranks):
        for instruction in instructions:
            if instruction.action.computes:
                step, microbatch = instruction.step or 0, instruction.microbatch or 0
                stale = delays[step][instruction.stage][microbatch] > 0
                yield Cell(
                    instruction.tick / tick, row_of(layout, rank, microbatch), stale, instruction
                )


def _draw_grid(axes: Axes, program: Program, width: float, height: float) -> None:
    """Draw the cells, each about ``width`` times ``height`` points."""
    drawn_cells = list(cells(program))
    corners = [(0, -0.45), (1, -0.45), (1, 0.45), (0, 0.45)]
    rectangles = [
        [(slot + right, row + down) for right, down in corners] for slot, row, *_ in drawn_cells
    ]
    fills = [
        to_rgba(_FILL[instruction.action], 0.4 + 0.3 * ((instruction.step or 0) % 3))
        for *_, instruction in drawn_cells
    ]
    cell_style: dict[str, Any] = {
        "edgecolors": "white",
        "linewidths": min(0.6, 0.1 * width, 0.1 * height),
    }
    axes.add_collection(PolyCollection(rectangles, facecolors=fills, **cell_style))
    bars = [
        [(slot + 0.2, row + 0.34), (slot + 0.8, row + 0.34)]
        for slot, row, is_stale, _ in drawn_cells
        if is_stale
    ]
    bar_width = min(1.0, 0.15 * height)
    axes.add_collection(
        LineCollection(bars, colors=BLACK, linewidths=bar_width, capstyle="projecting")
    )
    digits = len(str(program.schedule.n_stages - 1))
    font_size = min(_LETTERS, 1.3 * width / digits, 0.75 * height)
    if font_size >= _SMALLEST:
        cell_style = {"ha": "center", "va": "center", "fontsize": font_size, "in_layout": False}
        for slot, row, _, instruction in drawn_cells:
            axes.text(slot + 0.5, row, str(instruction.stage), **cell_style)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_memory(axes: Axes, slot_activations: Sequence[float]) -> None:
    axes.stairs(slot_activations, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(slot_activations, color=BLUE)
    peak = max(slot_activations)
    axes.hlines(peak, 0, len(slot_activations), color=BLACK, linewidth=0.6, linestyle=":")
    label_style: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 7}
    axes.annotate(f"peak {peak:.4g}", (len(slot_activations), peak), (0, 3), **label_style)

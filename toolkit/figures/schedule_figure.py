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
    """One column a schedule: its grid, and below it the activations alive in each slot.

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
    wrong = [schedule for schedule in shown if not isinstance(schedule, Schedule)]
    if wrong or not shown:
        given = repr(wrong[0]) if wrong else "none"
        raise UserError(f"schedules are drawn, such as catalog.cyclic(4): got {given}")
    programs = [_lowered(schedule, n_steps) for schedule in shown]
    alive = [[x / p.schedule.n_stages for x in p.total_activations()] for p in programs]
    shapes = [rows(schedule.layout) for schedule in shown]
    n_slots = max(program.n_slots for program in programs)
    most = max(n for _, n in shapes)
    height = min(_TALLEST, max(_GRID, _ROW * most))
    with drawing((_COLUMN * len(shown) + 0.4, height + _MEMORY + _AROUND)) as figure:
        grids, memories = figure.subplots(
            2, len(shown), squeeze=False, height_ratios=(height, _MEMORY), sharex=True
        )
        for program, totals, grid, memory in zip(programs, alive, grids, memories, strict=True):
            _draw_grid(grid, program, _WIDE / n_slots, 72 * height / most)
            grid.set_title(program.schedule.name)
            _draw_memory(memory, totals)
            memory.set_ylim(0, 1.2 * max(map(max, alive)))
            memory.set_xlabel("slot")
            memory.xaxis.set_major_locator(MultipleLocator(_ticks(shown[0], n_slots)))
            memory.tick_params(labelleft=memory is memories[0])
        align(grids, shapes)
        memories[0].set_ylabel("activations\n(micro-batches)")
        memories[0].set_xlim(0, n_slots)
        keys = _keys(shown)
        ncols = 2 if len(shown) == 1 and len(keys) > 3 else len(keys)
        figure.legend(handles=keys, loc="outside lower center", ncols=ncols)
    return figure


def _ticks(schedule: Schedule, n_slots: int) -> float:
    """Slots between two labels of the axis: a training step, or several."""
    step = max(1, round(schedule.final.period))
    return step * -(-n_slots // step // _TICKS)


def _lowered(schedule: Schedule, n_steps: int) -> Program:
    """The program that is drawn; of schedules before the last, one step each."""
    if isinstance(schedule, PhasedSchedule):
        phases = tuple(Phase(phase.schedule, 1) for phase in schedule.phases)
        schedule, n_steps = replace(schedule, phases=phases), n_steps + len(phases) - 1
    return schedule.lower(n_steps)


def _keys(shown: Sequence[Schedule]) -> list[Patch | Line2D]:
    """What colours and bars mean; a colour that only some schedules have, where one has it."""
    named = {"forward": SKY, "backward": ORANGE}
    if any(schedule.splits_backward for schedule in shown):
        named["backward of weights"] = YELLOW
    keys: list[Patch | Line2D] = [Patch(color=fill, label=name) for name, fill in named.items()]
    if any(schedule.max_staleness for schedule in shown):
        keys.append(Line2D([], [], color=BLACK, linewidth=1.5, label="reads stale weights"))
    return keys


def cells(program: Program) -> Iterator[Cell]:
    """The ops of ``program`` as cells of its grid."""
    tick, layout = program.schedule.timing.ticks_per_slot, program.schedule.layout
    delays = {step: program.schedule.delays(step) for step in program.steps}
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action.computes:
                step, m = i.step or 0, i.microbatch or 0
                stale = delays[step][i.stage][m] > 0
                yield Cell(i.tick / tick, row_of(layout, rank, m), stale, i)


def _draw_grid(axes: Axes, program: Program, width: float, height: float) -> None:
    """Draw the cells, each about ``width`` times ``height`` points."""
    shown = list(cells(program))
    corners = [(0, -0.45), (1, -0.45), (1, 0.45), (0, 0.45)]
    boxes = [[(x + dx, y + dy) for dx, dy in corners] for x, y, *_ in shown]
    fills = [to_rgba(_FILL[i.action], 0.4 + 0.3 * ((i.step or 0) % 3)) for *_, i in shown]
    look: dict[str, Any] = {
        "edgecolors": "white",
        "linewidths": min(0.6, 0.1 * width, 0.1 * height),
    }
    axes.add_collection(PolyCollection(boxes, facecolors=fills, **look))
    bars = [[(x + 0.2, y + 0.34), (x + 0.8, y + 0.34)] for x, y, stale, _ in shown if stale]
    thick = min(1.0, 0.15 * height)
    axes.add_collection(LineCollection(bars, colors=BLACK, linewidths=thick, capstyle="projecting"))
    digits = len(str(program.schedule.n_stages - 1))
    letters = min(_LETTERS, 1.3 * width / digits, 0.75 * height)
    if letters >= _SMALLEST:
        look = {"ha": "center", "va": "center", "fontsize": letters, "in_layout": False}
        for x, y, _, i in shown:
            axes.text(x + 0.5, y, str(i.stage), **look)
    axes.tick_params(length=0, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _draw_memory(axes: Axes, totals: Sequence[float]) -> None:
    axes.stairs(totals, fill=True, color=BLUE, alpha=0.25)
    axes.stairs(totals, color=BLUE)
    peak = max(totals)
    axes.hlines(peak, 0, len(totals), color=BLACK, linewidth=0.6, linestyle=":")
    look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "fontsize": 7}
    axes.annotate(f"peak {peak:.4g}", (len(totals), peak), (0, 3), **look)

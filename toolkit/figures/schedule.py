"""Schedules as grids, over their activation memory."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from toolkit.figures.style import BLACK, BLUE, ORANGE, SKY, style
from toolkit.schedule import Action, Instruction, Program, Schedule

_FILL = {
    Action.FORWARD: SKY,
    Action.BACKWARD: ORANGE,
    Action.BACKWARD_INPUT: ORANGE,
    Action.BACKWARD_WEIGHT: "#F5D9A0",
}


def schedules(shown: Sequence[Schedule], n_steps: int = 3) -> Figure:
    """One column a schedule: its grid, and below it the activations alive in each slot.

    A row is a rank; where one rank runs several ops at once, a row is a micro-batch. A cell
    bears its stage; a bar under it means that it reads weights one step or more late. Colour
    deepens from step to step. Memory is the sum over ranks, in micro-batches: 1 is all
    activations of one.
    """
    with style():
        figure = Figure(figsize=(3.2 * len(shown) + 0.4, 3.4), layout="constrained")
        grids, memories = figure.subplots(
            2, len(shown), squeeze=False, height_ratios=(3, 2), sharex="col", sharey="row"
        )
        for schedule, grid, memory in zip(shown, grids, memories, strict=True):
            program = schedule.lower(n_steps)
            _draw_grid(grid, program)
            _draw_memory(memory, program)
            grid.set_title(schedule.name)
        grids[0].set_ylabel("rank" if shown[0].layout.name != "one" else "micro-batch")
        memories[0].set_ylabel("activations\n(micro-batches)")
        for axes in memories:
            axes.set_xlabel("slot")
        keys = [
            Patch(color=_FILL[Action.FORWARD], label="forward"),
            Patch(color=_FILL[Action.BACKWARD], label="backward"),
            Line2D([], [], color=BLACK, linewidth=1.5, label="reads stale weights"),
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)
        return figure


def _draw_grid(axes: Axes, program: Program) -> None:
    one = program.schedule.layout.name == "one"
    tick = program.schedule.timing.ticks_per_slot
    rows = set()
    for rank, instructions in enumerate(program.ranks):
        for i in instructions:
            if i.action.computes:
                row = (i.microbatch or 0) if one else rank
                rows.add(row)
                delays = program.schedule.delays(i.step or 0)
                stale = delays[i.stage][i.microbatch or 0] > 0
                _draw_op(axes, i, i.tick / tick, row, stale)
    axes.set_xlim(0, program.n_slots)
    axes.set_ylim(max(rows) + 0.5, -0.5)
    axes.set_yticks(sorted(rows))
    axes.tick_params(length=0, labelbottom=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_op(axes: Axes, i: Instruction, slot: float, row: int, stale: bool) -> None:
    faded = 0.4 + 0.3 * ((i.step or 0) % 3)
    box = Rectangle(
        (slot, row - 0.45), 1, 0.9, facecolor=_FILL[i.action], alpha=faded, edgecolor="white",
        linewidth=0.6,
    )  # fmt: skip
    axes.add_patch(box)
    axes.text(slot + 0.5, row, str(i.stage), ha="center", va="center", fontsize=5.5, color=BLACK)
    if stale:
        axes.plot([slot + 0.2, slot + 0.8], [row + 0.34] * 2, color=BLACK, linewidth=1)


def _draw_memory(axes: Axes, program: Program) -> None:
    n_stages = program.schedule.n_stages
    totals = [sum(alive) / n_stages for alive in zip(*program.activations(), strict=True)]
    edges = range(len(totals) + 1)
    axes.stairs(totals, list(edges), fill=True, color=BLUE, alpha=0.25)
    axes.stairs(totals, list(edges), color=BLUE)
    peak = max(totals)
    axes.axhline(peak, color=BLACK, linewidth=0.6, linestyle=":")
    axes.annotate(
        f"peak {peak:g}", (len(totals), peak), (0, 2), textcoords="offset points", ha="right",
        va="bottom", fontsize=7,
    )  # fmt: skip
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(0, 1.2 * program.schedule.n_microbatches)

"""Time of training and accuracy of methods that make messages small."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FormatStrFormatter, NullLocator

from toolkit.figures.style import BLACK, BLUE, GREEN, MARKERS, drawing

_COLOURS = {"ddp": BLACK, "cdp_v1": BLUE, "cdp_v2": GREEN}
_PANEL = 2.4, 2.2  # inches
_LEGEND_HEIGHT = 0.7
_COLUMNS = 3
_TICKS = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]


def draw_time_to_accuracy(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each model and machine: accuracy over step time, a mark a method.

    Vertical lines are standard deviations over seeds. Full marks, which a grey line joins, are
    methods that no other is at least as fast and as accurate as.

    Args:
        rows: of :func:`toolkit.results.time_to_accuracy.time_to_accuracy`.
    """
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = row["model"], row["batch"], row["samples"], row["machine"], row["ratio"]
        panels.setdefault(key, []).append(row)
    names = dict.fromkeys(row["name"] for row in rows)
    marks = dict(zip(names, cycle(MARKERS), strict=False))
    n_columns = min(_COLUMNS, len(panels))
    n_lines = -(-len(panels) // n_columns)
    width, height = _PANEL
    size = n_columns * width, n_lines * height + _LEGEND_HEIGHT
    with drawing(size) as figure:
        grid = figure.subplots(n_lines, n_columns, squeeze=False, sharey=True)
        all_axes = [*grid.flat]
        for axes, (key, points) in zip(all_axes, panels.items(), strict=False):
            model, batch, samples, machine, ratio = key
            axes.set_title(f"{model}, {batch} {samples}\n{machine}: M = {ratio:.2g} C")
            _draw_panel(axes, points, marks)
        for axes in all_axes[len(panels) :]:
            axes.axis("off")
        figure.supxlabel("step time by that of DDP with whole messages", fontsize=8)
        figure.supylabel("accuracy (%)", fontsize=8)
        handles, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(
            handles,
            labels,
            loc="outside upper center",
            ncols=2 * n_columns,
            fontsize=6,
        )
    return figure


def _draw_panel(
    axes: Axes, points: Sequence[Mapping[str, Any]], marks: Mapping[str, str]
) -> None:
    front = [point for point in points if point["front"]]
    axes.plot(
        [point["time"] for point in front],
        [point["accuracy"] for point in front],
        color="#BBBBBB",
        zorder=0,
    )
    for point in points:
        colour = _COLOURS[point["rule"]]
        axes.errorbar(
            point["time"],
            point["accuracy"],
            yerr=point["accuracy_sd"] or 0.0,
            color=colour,
            marker=marks[point["name"]],
            markersize=4.5,
            markerfacecolor=colour if point["front"] else "white",
            linestyle="none",
            elinewidth=0.5,
            label=point["name"],
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.15)

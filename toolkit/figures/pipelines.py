"""Pipelines side by side: what their fullest rank holds, and how long their ranks idle."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from toolkit.figures.names import name_points
from toolkit.figures.style import BLUE, VERMILION, drawing, style

Rows = Sequence[Mapping[str, Any]]

_FLUSHED: dict[str, Any] = {"color": BLUE, "marker": "o", "markersize": 4}
_LATE: dict[str, Any] = {  # open, so that it shows a dot at the same place
    "color": VERMILION, "marker": "s", "markersize": 7, "markerfacecolor": "none",
}  # fmt: skip
_LABELS = {True: "fresh weights, a flush at each step", False: "late weights, no flush"}
_COLUMNS = 3


def pipelines(rows: Rows) -> Figure:
    """A panel for each number of micro-batches, a point a method: the nearer to 0 the better.

    Args:
        rows: ``method``, ``microbatches``, ``ranks``; ``activations`` of the fullest rank, in
            micro-batches; ``idle``, a share of time; ``flush``, whether all weights are fresh.
    """
    sizes = list(dict.fromkeys(row["microbatches"] for row in rows))
    columns, lines = min(len(sizes), _COLUMNS), -(-len(sizes) // _COLUMNS)
    with style():
        size = (0.6 + 2.2 * max(columns, 1.5), 0.8 + 2.4 * lines)
        figure = drawing(size)
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        panels = list(grid.flat)
        for axes in panels[len(sizes) :]:
            axes.set_axis_off()
        for axes in panels[max(0, len(sizes) - columns) :]:
            axes.tick_params(labelbottom=True)  # also where none is below
        named = {m: _points(rows, m) for m in sizes}
        for axes, m in zip(panels, sizes, strict=False):
            p = rows[0]["ranks"]
            axes.set_title(f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}")
            for x, y, flush in named[m]:
                axes.plot([x], [y], linestyle="none", clip_on=False, **_look(flush))
        _scale(panels[0], rows)
        figure.supxlabel("activations of the fullest rank (micro-batches)", fontsize=8)
        figure.supylabel("idle share of a rank's time", fontsize=8)
        handles = [Line2D([], [], ls="none", label=_LABELS[f], **_look(f)) for f in (True, False)]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        figure.draw_without_rendering()  # which gives the panels their places
        for axes, m in zip(panels, sizes, strict=False):
            names = [(x, y, "\n".join(n), _look(f)["color"]) for (x, y, f), n in named[m].items()]
            name_points(axes, names)
        return figure


def _points(rows: Rows, n_microbatches: int) -> dict[tuple[float, float, bool], list[str]]:
    """The methods that fall on each point: activations, idle share, flush."""
    found: defaultdict[tuple[float, float, bool], list[str]] = defaultdict(list)
    for row in rows:
        if row["microbatches"] == n_microbatches:
            at = float(row["activations"]), round(row["idle"], 6), row["flush"]
            found[at].append(row["method"])
    return dict(found)


def _look(flush: bool) -> dict[str, Any]:
    return _FLUSHED if flush else _LATE


def _scale(axes: Axes, rows: Rows) -> None:
    """Of all panels, with room for names."""
    held = [float(row["activations"]) for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(held) / 1.6, max(held) * 2)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    top = max(0.1, *(row["idle"] for row in rows))
    axes.set_ylim(-0.18 * top, 1.12 * top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.12 * top])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

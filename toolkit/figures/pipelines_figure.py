"""Pipelines side by side: memory of their fullest rank, and idle time of their ranks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import cos, hypot, pi, sin
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter
from matplotlib.transforms import Bbox, BboxBase

from toolkit.figures.style import BLUE, VERMILION, drawing

Rows = Sequence[Mapping[str, Any]]

_LOOKS: dict[bool, dict[str, Any]] = {  # by whether weights are fresh
    True: {"color": BLUE, "marker": "o", "markersize": 4},
    # Open, so that a dot at the same place shows
    False: {"color": VERMILION, "marker": "s", "markersize": 7, "markerfacecolor": "none"},
}
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
    named = {m: _points(rows, m) for m in sizes}
    with drawing((0.6 + 2.2 * max(columns, 1.5), 0.8 + 2.4 * lines)) as figure:
        grid = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True)
        panels = list(grid.flat)
        for axes in panels[len(sizes) :]:
            axes.set_axis_off()
        for axes in panels[max(0, len(sizes) - columns) :]:
            axes.tick_params(labelbottom=True)  # also above an empty place
        for axes, m in zip(panels, sizes, strict=False):
            p = rows[0]["ranks"]
            axes.set_title(f"{p} rank{'s' * (p > 1)}, {m} micro-batch{'es' * (m > 1)}")
            for x, y, flush in named[m]:
                axes.plot([x], [y], linestyle="none", clip_on=False, **_LOOKS[flush])
        _scale(panels[0], rows)
        figure.supxlabel("activations of the fullest rank (micro-batches)", fontsize=8)
        figure.supylabel("idle share of a rank's time", fontsize=8)
        handles = [Line2D([], [], ls="none", label=_LABELS[f], **_LOOKS[f]) for f in (True, False)]
        figure.legend(handles=handles, loc="outside upper center", ncols=2)
        figure.draw_without_rendering()  # which gives the panels their places
        for axes, m in zip(panels, sizes, strict=False):
            names = [(x, y, "\n".join(n), _LOOKS[f]["color"]) for (x, y, f), n in named[m].items()]
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


_ANGLES = (0, 4, 1, 7, 3, 5, 2, 6)  # eighths of a turn: first to the right, then left
_DISTANCES = (6, 10, 16, 24, 34, 46)  # points
_OFFSETS = [
    (round(distance * cos(eighth * pi / 4), 3), round(distance * sin(eighth * pi / 4), 3))
    for distance in _DISTANCES
    for eighth in _ANGLES
]
_HORIZONTAL = {1: "left", 0: "center", -1: "right"}
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}
_LINED = 12  # points beyond which a line joins a name and its point
_MARKER = 4  # points from the middle of a point to its edge


def name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name as near to its point as there is room, or where it covers least.

    Args:
        axes: with their limits, in a figure that has been laid out.
        points: x, y, name (possibly of several lines) and colour.
    """
    figure: Any = axes.figure
    point = figure.dpi / 72  # pixels
    frame = axes.get_window_extent()
    at = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [Bbox([xy, xy]).padded(_MARKER * point) for xy in at]
    for k in sorted(range(len(points)), key=lambda k: -points[k][2].count("\n")):
        x, y, name, colour = points[k]
        text: Any = axes.annotate(
            name, (x, y), (0, 0), textcoords="offset points", color=colour, fontsize=6.5
        )
        text.set_in_layout(False)
        size = text.get_window_extent().padded(1).size
        boxes = {}
        for offset in _OFFSETS:  # a box begins at its offset and leads away from the point
            corner = at[k] + point * np.array(offset) + (np.sign(offset) - 1) / 2 * size
            boxes[offset] = Bbox([corner, corner + size])
        best = min(boxes, key=lambda offset: _covered(boxes[offset], taken, frame))
        taken.append(boxes[best])
        text.set_position(best)
        text.set_horizontalalignment(_HORIZONTAL[np.sign(best[0])])
        text.set_verticalalignment(_VERTICAL[np.sign(best[1])])
        if hypot(*best) > _LINED:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0}
            axes.annotate("", (x, y), best, textcoords="offset points", arrowprops=line)


def _covered(box: Bbox, taken: Sequence[Bbox], frame: BboxBase) -> float:
    """Pixels of a box that are taken or outside of the frame."""
    outside = box.width * box.height - _common(box, frame)
    return round(outside + sum(_common(box, other) for other in taken), 3)


def _common(box: Bbox, other: BboxBase) -> float:
    both = Bbox.intersection(box, other)
    return 0.0 if both is None else both.width * both.height

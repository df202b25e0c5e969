"""Names beside points, such that none covers a point, or another name."""

from collections.abc import Sequence
from math import cos, hypot, pi, sin
from typing import Any

from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

_ANGLES = (0, 1, 7, 4, 3, 5, 2, 6)  # eighths of a turn: first to the right
_DISTANCES = (6, 10, 16, 24, 34, 46)  # points
_LINED = 12  # points from which on a line leads from a name to its point
_MARKER = 4  # points from the middle of a point to its edge


def name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name as near to its point as there is room; where there is none, over the least.

    Args:
        axes: with their limits, in a figure that has been laid out.
        points: x, y, name (maybe of some lines) and colour.
    """
    figure: Any = axes.figure
    scale = figure.dpi / 72
    frame = axes.get_window_extent()
    middles = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [Bbox([at - _MARKER * scale, at + _MARKER * scale]) for at in middles]
    for x, y, name, colour in sorted(points, key=lambda point: -point[2].count("\n")):
        text = axes.annotate(
            name, (x, y), xytext=(0, 0), textcoords="offset points", color=colour, fontsize=6.5
        )
        text.set_in_layout(False)

        def box(offset: tuple[float, float], text: Any = text) -> Bbox:
            """Where the name is, once it is there."""
            text.set_position(offset)
            text.set_horizontalalignment(_side(offset[0], "left", "right"))
            text.set_verticalalignment(_side(offset[1], "bottom", "top"))
            return text.get_window_extent().padded(scale)

        best = min(_OFFSETS, key=lambda offset: _covered(box(offset), taken, frame))
        taken.append(box(best))
        if hypot(*best) > _LINED:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0}
            axes.annotate("", (x, y), best, textcoords="offset points", arrowprops=line)


def _covered(box: Bbox, taken: Sequence[Bbox], frame: Bbox) -> float:
    """Of the area of a box: what others have, and what is outside of the frame."""
    outside = box.width * box.height - _common(box, frame)
    return round(outside + sum(_common(box, other) for other in taken), 6)


def _common(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else shared.width * shared.height


def _side(offset: float, above: str, below: str) -> str:
    if abs(offset) < 1e-6:
        return "center"
    return above if offset > 0 else below


_OFFSETS = [
    (distance * cos(eighth * pi / 4), distance * sin(eighth * pi / 4))
    for distance in _DISTANCES
    for eighth in _ANGLES
]

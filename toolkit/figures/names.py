"""Names beside points, such that none covers a point, or another name."""

from collections.abc import Sequence
from math import cos, hypot, pi, sin
from typing import Any, NamedTuple

from matplotlib.axes import Axes

_ANGLES = (0, 4, 1, 7, 3, 5, 2, 6)  # eighths of a turn: first to the right, then left
_DISTANCES = (6, 10, 16, 24, 34, 46)  # points
_OFFSETS = [
    (round(distance * cos(eighth * pi / 4), 3), round(distance * sin(eighth * pi / 4), 3))
    for distance in _DISTANCES
    for eighth in _ANGLES
]
_HORIZONTAL = {1: "left", 0: "center", -1: "right"}
_VERTICAL = {1: "bottom", 0: "center", -1: "top"}
_LINED = 12  # points from which on a line leads from a name to its point
_MARKER = 4  # points from the middle of a point to its edge


class _Box(NamedTuple):
    """In points."""

    left: float
    bottom: float
    right: float
    top: float

    def common(self, other: "_Box") -> float:
        """The area that both have."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)


def name_points(axes: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name as near to its point as there is room; where there is none, over the least.

    Args:
        axes: with their limits, in a figure that has been laid out.
        points: x, y, name (maybe of some lines) and colour.
    """
    figure: Any = axes.figure
    scale = 72 / figure.dpi
    frame = _Box(*(scale * axes.get_window_extent().extents))
    at = [scale * axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [_Box(x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER) for x, y in at]
    for k in sorted(range(len(points)), key=lambda k: -points[k][2].count("\n")):
        x, y, name, colour = points[k]
        text: Any = axes.annotate(
            name, (x, y), (0, 0), textcoords="offset points", color=colour, fontsize=6.5
        )
        text.set_in_layout(False)
        size = text.get_window_extent().padded(1 / scale).size * scale
        boxes = {offset: _beside(at[k], offset, size) for offset in _OFFSETS}
        best = min(boxes, key=lambda offset: _covered(boxes[offset], taken, frame))
        taken.append(boxes[best])
        text.set_position(best)
        text.set_horizontalalignment(_HORIZONTAL[_sign(best[0])])
        text.set_verticalalignment(_VERTICAL[_sign(best[1])])
        if hypot(*best) > _LINED:
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0}
            axes.annotate("", (x, y), best, textcoords="offset points", arrowprops=line)


def _beside(at: Sequence[float], offset: Sequence[float], size: Sequence[float]) -> _Box:
    """A box that begins at an offset from a point, and leads away from it."""
    left, bottom = (
        start + shift + (_sign(shift) - 1) / 2 * length
        for start, shift, length in zip(at, offset, size, strict=True)
    )
    return _Box(left, bottom, left + size[0], bottom + size[1])


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _covered(box: _Box, taken: Sequence[_Box], frame: _Box) -> float:
    """Of the area of a box: what others have, and what is outside of the frame."""
    outside = box.common(box) - box.common(frame)
    return round(outside + sum(map(box.common, taken)), 6)

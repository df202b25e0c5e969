"""Rows of panels side by side: of one height in all of them, and each panel's own by name."""

from collections.abc import Sequence

from matplotlib.axes import Axes

_NUMBERED = 16  # rows, at most


def align(panels: Sequence[Axes], rows: Sequence[tuple[str, int]]) -> None:
    """Give all panels room for the most rows; number each one's own, unless as those to its left.

    Args:
        panels: from left to right, the first row on top at 0.
        rows: what a row of each panel is, and how many there are.
    """
    most = max(n for _, n in rows)
    for k, (axes, (name, n)) in enumerate(zip(panels, rows, strict=True)):
        axes.set_ylim(most - 0.5, -0.5)
        axes.set_yticks(range(0, n, -(-most // _NUMBERED)))
        axes.spines["left"].set_bounds(-0.5, n - 0.5)
        if k and rows[k - 1] == (name, n):
            axes.tick_params(labelleft=False)
        else:
            axes.set_ylabel(name, y=1 - n / most / 2)

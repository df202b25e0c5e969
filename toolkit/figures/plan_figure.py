"""A plan: step time and memory of every schedule that was simulated."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from toolkit.figures.style import BLACK, VERMILION, drawing
from toolkit.format import GIB

Row = Mapping[str, Any]
SLOWEST = 5.0
_NUMBERED = 12


def plan_figure(
    unbeaten: Sequence[Row], beaten: Sequence[Row], baseline: Row, limit: float = inf
) -> Figure:
    """Draw a point a prediction: the nearer to the lower left the better.

    Those that take more than :data:`SLOWEST` times as long as the fastest are left out.

    Args:
        unbeaten: ``seconds``, ``memory`` in bytes, ``ranks`` and mean ``staleness`` of the
            predictions that no other beats; the first have the numbers of their rows.
        beaten: those of the other predictions.
        baseline: that of data parallelism.
        limit: bytes of a rank's memory.
    """
    fastest = min(row["seconds"] for row in (*unbeaten, *beaten, baseline))
    unbeaten = [row for row in unbeaten if row["seconds"] <= SLOWEST * fastest]
    beaten = [row for row in beaten if row["seconds"] <= SLOWEST * fastest]
    with drawing((6.4, 3.6)) as figure:
        axes = figure.subplots()
        _scatter(axes, beaten, s=6, color="#CCCCCC", label="other schedules")
        dots = _scatter(
            axes,
            unbeaten,
            s=30,
            c=[row["staleness"] for row in unbeaten],
            vmin=0,
            vmax=1,
            cmap="viridis_r",
            zorder=3,
            label="none is faster, smaller and fresher",
        )
        for number, row in enumerate(unbeaten[:_NUMBERED]):
            side = -1 if number % 2 == 0 else 1  # left and right in turn
            axes.annotate(
                str(number),
                (row["seconds"] * 1e3, row["memory"] / GIB),
                (7 * side, -2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
        label = f"DDP, {baseline['ranks']} ranks"
        _scatter(axes, [baseline], s=60, marker="x", color=VERMILION, zorder=4, label=label)
        axes.set(yscale="log", xlabel="step time (ms)")
        axes.set_ylabel("memory of the fullest rank (GiB)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if limit / GIB < axes.get_ylim()[1]:
            axes.axhline(limit / GIB, color=BLACK, linewidth=0.8, linestyle="--", label="memory")
        figure.colorbar(dots, label="mean staleness (steps)")
        figure.legend(loc="outside upper left", ncols=4)
    return figure


def _scatter(axes: Axes, rows: Sequence[Row], **style: Any) -> PathCollection:
    milliseconds = [row["seconds"] * 1e3 for row in rows]
    return axes.scatter(milliseconds, [row["memory"] / GIB for row in rows], **style)

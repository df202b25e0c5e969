"""A plan: step time and memory of every schedule that was simulated."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from toolkit.figures.style import BLACK, VERMILION, drawing
from toolkit.format import GIB

Row = Mapping[str, Any]
SLOWEST = 5.0
_NUMBERED = 12


def plan_figure(
    shown: Sequence[Row], others: Sequence[Row], baseline: Row, limit: float = inf
) -> Figure:
    """Draw a point a prediction: the nearer to the lower left the better.

    Those that take more than :data:`SLOWEST` times as long as the fastest are left out.

    Args:
        shown: ``seconds``, ``memory`` in bytes, ``ranks`` and mean ``staleness`` of the predictions
            that no other beats; the first have the numbers of their rows.
        others: those of the other predictions.
        baseline: that of data parallelism.
        limit: bytes of a rank's memory.
    """
    slowest = SLOWEST * min(row["seconds"] for row in (*shown, *others, baseline))
    shown, others = ([row for row in rows if row["seconds"] <= slowest] for rows in (shown, others))
    with drawing((6.4, 3.6)) as figure:
        axes = figure.subplots()
        axes.scatter(*_places(others), s=6, color="#CCCCCC", label="other schedules")
        dots = axes.scatter(
            *_places(shown), s=30, c=[row["staleness"] for row in shown], vmin=0, vmax=1,
            cmap="viridis_r", zorder=3, label="none is faster, smaller and fresher",
        )  # fmt: skip
        for number, row in enumerate(shown[:_NUMBERED]):
            point = row["seconds"] * 1e3, row["memory"] / GIB
            axes.annotate(  # left and right in turn
                str(number), point, (7 * (-1) ** (number + 1), -2), textcoords="offset points",
                ha="center", fontsize=7,
            )  # fmt: skip
        axes.scatter(
            *_places([baseline]), s=60, marker="x", color=VERMILION, zorder=4,
            label=f"DDP, {baseline['ranks']} ranks",
        )  # fmt: skip
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


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["seconds"] * 1e3 for row in rows], [row["memory"] / GIB for row in rows]

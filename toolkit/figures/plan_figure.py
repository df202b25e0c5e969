"""A plan: step time and memory of every schedule that was simulated."""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from toolkit.figures.style import BLACK, VERMILION, drawing
from toolkit.format import GIB, MIB

Row = Mapping[str, Any]
SLOWEST = 5.0
_NEAR = 9.0  # points between dots that share a label


def plan_figure(
    unbeaten: Sequence[Row], beaten: Sequence[Row], baseline: Row, limit: float = inf
) -> Figure:
    """Draw a point a prediction: the nearer to the lower left the better.

    All unbeaten ones are drawn, with the numbers of the rows of a plan's table; times are
    logarithmic if some take more than :data:`SLOWEST` times as long as the fastest. Beaten ones
    that take longer than that, and than all unbeaten ones, are left out.

    Args:
        unbeaten: ``seconds``, ``memory`` in bytes, ``ranks`` and mean ``staleness`` of the
            predictions that no other beats, in the order of the table.
        beaten: those of the other predictions.
        baseline: that of data parallelism.
        limit: bytes of a rank's memory.
    """
    fastest = min(row["seconds"] for row in (*unbeaten, *beaten, baseline))
    # Of those that are always drawn: the axis has to reach them in any case.
    slowest = max(row["seconds"] for row in (*unbeaten, baseline))
    is_wide = slowest > SLOWEST * fastest
    # One very slow schedule would press all others into a corner.
    beaten = [
        row for row in beaten if row["seconds"] <= max(slowest, SLOWEST * fastest)
    ]
    max_memory = max(row["memory"] for row in (*unbeaten, *beaten, baseline))
    unit, unit_name = (GIB, "GiB") if max_memory >= GIB else (MIB, "MiB")
    with drawing((6.4, 3.6)) as figure:
        axes = figure.subplots()
        _scatter(axes, unit, beaten, s=6, color="#CCCCCC", label="other schedules")
        dots = _draw_unbeaten(axes, unit, unbeaten)
        label = f"DDP, {baseline['ranks']} ranks"
        _scatter(
            axes,
            unit,
            [baseline],
            s=60,
            marker="x",
            color=VERMILION,
            zorder=4,
            label=label,
        )
        axes.set_xlabel("step time (ms)")
        axes.set_ylabel(f"memory of the fullest rank ({unit_name})")
        _set_scales(axes, is_wide)
        if limit / unit < axes.get_ylim()[1]:
            axes.axhline(
                limit / unit, color=BLACK, linewidth=0.8, linestyle="--", label="memory"
            )
        figure.colorbar(dots, label="mean staleness (steps)")
        figure.legend(loc="outside upper left", ncols=4)
        figure.draw_without_rendering()  # positions in pixels are known from now on
        _number(axes, dots)
    return figure


def _draw_unbeaten(axes: Axes, unit: float, rows: Sequence[Row]) -> PathCollection:
    """Draw the predictions that no other beats, in the colour of their staleness."""
    return _scatter(
        axes,
        unit,
        rows,
        s=30,
        c=[row["staleness"] for row in rows],
        vmin=0,
        vmax=1,
        cmap="viridis_r",
        zorder=3,
        label="none is faster, smaller and fresher; number: its row",
    )


def _set_scales(axes: Axes, is_wide: bool) -> None:
    """Make memory logarithmic, and times too if they are wide apart; ticks at 1, 2, 5, 10, ..."""
    axes.set_yscale("log")
    logarithmic_axes: list[Axis] = [axes.yaxis]
    if is_wide:
        axes.set_xscale("log")
        logarithmic_axes.append(axes.xaxis)
    for axis in logarithmic_axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def _number(axes: Axes, dots: PathCollection) -> None:
    """Write the number of each dot's row next to it; dots that nearly coincide share a label."""
    data_places = np.asarray(dots.get_offsets())
    places = axes.transData.transform(data_places)
    groups: list[list[int]] = []
    # In pixels, since only there it shows whether two labels would overlap.
    for index, place in enumerate(places):
        # A dot between two groups joins them.
        merged_group = [index]
        far_groups = []
        for group in groups:
            if (
                abs(places[group] - place).max(axis=1).min()
                < _NEAR * axes.figure.dpi / 72
            ):
                merged_group += group
            else:
                far_groups.append(group)
        groups = [*far_groups, sorted(merged_group)]
    for group in sorted(groups):
        # To the right of the group, where its label covers none of its dots.
        rightmost = max(group, key=lambda index: places[index][0])
        axes.annotate(
            _ranges(group),
            tuple(data_places[rightmost]),
            (5, 3),
            textcoords="offset points",
            fontsize=7,
        )


def _ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as text, those that follow one another as a range: 0-2, 5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(
        f"{first}-{last[-1]}" if last else str(first) for first, *last in ranges
    )


def _scatter(
    axes: Axes, unit: float, rows: Sequence[Row], **style: Any
) -> PathCollection:
    milliseconds = [row["seconds"] * 1e3 for row in rows]
    return axes.scatter(milliseconds, [row["memory"] / unit for row in rows], **style)

"""Training on limited links: step times by method, and what travels when."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from toolkit.figures.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILION, drawing

# Beginnings of the methods' names, from top to bottom: first the baseline, last what no method can
# beat.
_FAMILIES = {
    "DDP": BLACK,
    "delayed": ORANGE,
    "CDP-v1": BLUE,
    "CDP-v2": GREEN,
    "affordable": VERMILION,
    "groups": PURPLE,
    "compute": "#777777",
}

Rows = Sequence[Mapping[str, Any]]
Curves = Mapping[str, Mapping[str, NDArray[np.float64]]]


def link_times(rows: Rows, traffic: Curves, window: float) -> Figure:
    """Draw step times divided by that of DDP, a panel per link; below, traffic over two steps.

    A dot is the ratio of medians, its line the range of ratios round by round.

    Args:
        rows: of one number of workers: ``link``, ``M/C``, ``method``, ``step (s)``, ``/ DDP``,
            ``least`` and ``most``, the last three None where DDP was not measured.
        traffic: Mbit/s in each window, by link and method; may be empty.
        window: seconds of a window.
    """
    methods = sorted({row["method"]: None for row in rows}, key=_place)
    traffic_names: dict[str, None] = {}
    for curves in traffic.values():
        traffic_names |= dict.fromkeys(curves)
    traffic_methods = sorted(traffic_names, key=_place)
    times_height = 0.9 + 0.19 * len(methods)
    if not traffic_methods:
        with drawing((7.2, times_height)) as figure:
            _draw_times(figure, rows, methods)
        return figure
    heights = [times_height, 0.4 + 0.72 * len(traffic_methods)]
    with drawing((7.2, sum(heights))) as figure:
        panels = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)
        times_panel, traffic_panel = panels[:, 0]
        _draw_times(times_panel, rows, methods)
        _draw_traffic(traffic_panel, traffic, traffic_methods, window)
    return figure


def _draw_times(figure: Any, rows: Rows, methods: list[str]) -> None:
    """Draw a panel per link and a row per method; rows of other families are divided by a line."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    panels = figure.subplots(1, len(links), squeeze=False, sharex=True, sharey=True)[0]
    # Without DDP on some link its ratios would stand next to seconds, so all rows are in seconds
    # then.
    is_relative = all(row["/ DDP"] is not None for row in rows)
    for axes, link in zip(panels, links, strict=True):
        link_rows = [row for row in rows if row["link"] == link]
        for row in link_rows:
            _draw_row(axes, row, methods.index(row["method"]), is_relative)
        if is_relative:
            axes.axvline(1, color=BLACK, linewidth=0.6, zorder=0)
        title = link
        if link_rows[0]["M/C"] is not None:
            title += f"\nmeasured M/C {link_rows[0]['M/C']:.2f}"
        axes.set_title(title)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.5)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        for height in range(1, len(methods)):
            if _colour(methods[height]) != _colour(methods[height - 1]):
                axes.axhline(height - 0.5, color="#DDDDDD", linewidth=0.5, zorder=0)
    # Downwards, so that the first method is on top.
    panels[0].set_ylim(len(methods) - 0.4, -0.6)
    panels[0].set_yticks(range(len(methods)), methods)
    # With the last value's digits.
    panels[0].set_xlim(0, 1.18 * panels[0].get_xlim()[1])
    figure.supxlabel(
        "step time divided by that of DDP" if is_relative else "step time (s)",
        fontsize=8,
    )


def _draw_row(axes: Axes, row: Mapping[str, Any], height: int, relative: bool) -> None:
    if relative:
        value, low, high = row["/ DDP"], row["least"], row["most"]
    else:
        value, low, high = row["step (s)"], row["min"], row["max"]
    colour = _colour(row["method"])
    axes.plot(
        [min(low, value), max(high, value)],
        [height] * 2,
        color=colour,
        alpha=0.45,
        lw=2.5,
    )
    axes.plot(
        [value], [height], color=colour, marker="o", linestyle="none", markersize=4
    )
    axes.annotate(
        f"{value:.2f}",
        (max(high, value), height),
        (4, 0),
        color=colour,
        textcoords="offset points",
        va="center",
        fontsize=6,
        # A white box keeps the number legible over the line at 1.
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
    )


def _draw_traffic(
    figure: Any, traffic: Curves, methods: list[str], window: float
) -> None:
    """Draw a column per link and a row per method.

    All rows of a column have one scale. A horizontal line is the mean.
    """
    panels = figure.subplots(
        len(methods), len(traffic), squeeze=False, sharex="col", sharey="col"
    )
    # Transposed, since a column of panels shares its link, its unit and its scale.
    for column, (link, curves) in zip(panels.T, traffic.items(), strict=True):
        # A method that sends nothing, or was not measured, leaves its panel empty.
        measured_curves = [curve for curve in curves.values() if len(curve)]
        peak_rate = max((float(curve.max()) for curve in measured_curves), default=0.0)
        unit, unit_name = (1000, "Gbit/s") if peak_rate >= 2000 else (1, "Mbit/s")
        for axes, method in zip(column, methods, strict=True):
            if len(curves.get(method, ())):
                _draw_curve(axes, curves[method] / unit, window, _colour(method))
            axes.text(
                0,
                1,
                method,
                color=_colour(method),
                transform=axes.transAxes,
                va="bottom",
            )
            axes.yaxis.set_major_locator(MaxNLocator(2))
        column[0].set_title(f"sent by all ranks, {link} ({unit_name})", pad=14)
        column[0].set_xlim(0, window * max(map(len, curves.values()), default=1))
        # Without traffic the limit would be 0; None leaves it to matplotlib.
        column[0].set_ylim(0, 1.05 * peak_rate / unit or None)
        column[-1].set_xlabel("time (s)")


def _draw_curve(
    axes: Axes, curve: NDArray[np.float64], window: float, colour: str
) -> None:
    edges = window * np.arange(len(curve) + 1)
    mean = float(curve.mean())
    axes.stairs(curve, edges, fill=True, color=colour, alpha=0.75)
    axes.axhline(mean, color=VERMILION, linewidth=1)
    # How bursty the traffic is: 1 if the link is used evenly.
    label = f"peak/mean {curve.max() / mean:.1f}" if mean > 0 else "silent"
    axes.text(
        1, 1, label, ha="right", color=VERMILION, transform=axes.transAxes, va="bottom"
    )


def _place(method: str) -> int:
    """Return the position of a method's family; other methods come last."""
    for position, family in enumerate(_FAMILIES):
        if method.startswith(family):
            return position
    return len(_FAMILIES)


def _colour(method: str) -> str:
    """Return the colour of the method's family; purple for other methods."""
    return [*_FAMILIES.values(), PURPLE][_place(method)]

"""Pipelines side by side: memory of their fullest rank, and idle time of their ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from toolkit.figures.style import MARKERS, SERIES, drawing
from toolkit.format import count

Rows = Sequence[Mapping[str, Any]]

_COLUMNS = 3
_LINE = 0.187  # inches of a line of the legend
_TITLE_LINES = 3


def pipelines(rows: Rows) -> Figure:
    """Draw a panel for each number of micro-batches, with a point a method.

    The nearer a point is to 0, the better.

    Args:
        rows: ``method``, ``microbatches``, ``ranks``; ``activations`` of the fullest rank, in
            micro-batches; ``idle``, a share of time; ``flush``, whether all weights are fresh.
    """
    sizes = list(dict.fromkeys(row["microbatches"] for row in rows))
    n_ranks = rows[0]["ranks"]
    styles = _styles(rows)
    n_columns = min(len(sizes), _COLUMNS)
    # Rounded up. The legend may be taller than the panels.
    n_lines = -(-len(sizes) // _COLUMNS)
    legend_height = _LINE * (len(styles) + _TITLE_LINES)
    height = max(0.5 + 2.1 * n_lines, legend_height)
    with drawing((1.8 + 1.9 * n_columns, height)) as figure:
        grid = figure.subplots(
            n_lines, n_columns, squeeze=False, sharex=True, sharey=True
        )
        panels = list(grid.flat)
        for axes in panels[len(sizes) :]:
            axes.set_axis_off()
        for axes in panels[max(0, len(sizes) - n_columns) :]:
            axes.tick_params(labelbottom=True)  # also above an empty place
        for axes, n_microbatches in zip(panels, sizes, strict=False):
            axes.set_title(
                f"{count(n_ranks, 'rank')},"
                f" {n_microbatches} micro-batch{'' if n_microbatches == 1 else 'es'}"
            )
            for row in rows:
                if row["microbatches"] == n_microbatches:
                    style = styles[row["method"]]
                    # A method without idle time lies on the axis, and is not cut there.
                    axes.plot(
                        [row["activations"]], [row["idle"]], clip_on=False, **style
                    )
        # All panels share their axes, so the scales of the first one are those of all.
        _scale(panels[0], rows)
        figure.supxlabel("activations of the fullest rank (micro-batches)", fontsize=8)
        figure.supylabel("idle share of a rank's time", fontsize=8)
        handles = [
            Line2D([], [], label=method, **style) for method, style in styles.items()
        ]
        title = "filled: a flush at each step\nring: late weights, no flush"
        legend = figure.legend(handles=handles, title=title, loc="outside right upper")
        legend.set_alignment("left")
    return figure


def _styles(rows: Rows) -> dict[str, dict[str, Any]]:
    """Return the style of each method; sizes differ so that several points at one place show."""
    styles: dict[str, dict[str, Any]] = {}
    n_flushing = 0
    n_late = 0
    for method, flush in {row["method"]: row["flush"] for row in rows}.items():
        if flush:
            # Each round of colours shifts the markers, so that no pair repeats soon.
            index = n_flushing
            marker = MARKERS[(index + index // len(SERIES)) % len(MARKERS)]
            style: dict[str, Any] = {
                "marker": marker,
                # Later ones are smaller and drawn on top, so that points at one place all show.
                "markersize": max(4, 8 - 3 * index),
            }
            n_flushing += 1
        else:
            index = n_late
            style = {
                "marker": "o",
                # Rings grow instead, and enclose what lies below them.
                "markersize": 7 + 3 * index,
                "markerfacecolor": "none",
            }
            n_late += 1
        styles[method] = style | {
            "linestyle": "none",
            "color": SERIES[index % len(SERIES)],
        }
    return styles


def _scale(axes: Axes, rows: Rows) -> None:
    """Set the scales that all panels share."""
    activations = [float(row["activations"]) for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(activations) / 1.4, max(activations) * 1.4)
    axes.xaxis.set_major_locator(LogLocator(base=2))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    # At least 10 %, so that methods without idle time do not blow up rounding.
    top = 1.12 * max(0.1, *(row["idle"] for row in rows))
    axes.set_ylim(-0.1 * top, top)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

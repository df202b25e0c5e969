"""Tuned and certified learning rates, and how far delay turns gradients."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullFormatter

from toolkit.figures.style import BLACK, MARKERS, drawing, series

_MARGIN = 1.6  # ratio of an axis's end to its outermost rate
_TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


def tuned_rates(
    rows: Sequence[Mapping[str, Any]],
    cosines: Mapping[str, Sequence[tuple[int, float]]],
) -> Figure:
    """Draw each rule's tuned rate over its certified one and, if measured, cosines over training.

    Args:
        rows: a row a rule: ``rule``, ``tuned / first`` and ``certified / first``, rates divided by
            those of the first rule.
        cosines: by rule, training steps and the cosine between the gradient that the schedule sums
            and the fresh one; may be empty.
    """
    with drawing((7.2 if cosines else 4.6, 2.8)) as figure:
        panels = figure.subplots(1, 2 if cosines else 1, squeeze=False)[0]
        _draw_rates(panels[0], rows)
        if cosines:
            rules = [row["rule"] for row in rows]
            _draw_cosines(panels[1], rules, cosines)
        handles, rules = panels[0].get_legend_handles_labels()
        panels[-1].legend(handles, rules, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_rates(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a marker a rule on logarithmic axes, and the line on which the two rates agree."""
    certified = [row["certified / first"] for row in rows]
    tuned = [row["tuned / first"] for row in rows]
    limits = [
        (min(rates) / _MARGIN, max(rates) * _MARGIN) for rates in (certified, tuned)
    ]
    # Through (1, 1), where the first rule is: rates are divided by its own.
    axes.axline((1, 1), (2, 2), color=BLACK, linewidth=0.6, linestyle=":")
    for index, row in enumerate(rows):
        axes.plot(
            row["certified / first"],
            row["tuned / first"],
            marker=_marker(index),
            markersize=6,
            linestyle="none",
            color=series(index)["color"],
            alpha=0.8,
            label=fill(row["rule"], 28),
        )
    axes.set(xscale="log", yscale="log", xlim=limits[0], ylim=limits[1])
    for axis, (low, high) in zip((axes.xaxis, axes.yaxis), limits, strict=True):
        # Fixed ticks, since matplotlib labels few within one decade.
        ticks = [tick for tick in _TICKS if low <= tick <= high]
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_major_formatter(FixedFormatter([f"{tick:g}" for tick in ticks]))
        axis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(f"certified rate / that of {rows[0]['rule']}")
    axes.set_ylabel(f"tuned rate / that of {rows[0]['rule']}")


def _marker(index: int) -> str:
    """Return the marker of a rule; when colours start again, markers are shifted by one."""
    return MARKERS[(index + index // len(MARKERS)) % len(MARKERS)]


def _draw_cosines(
    axes: Axes, rules: Sequence[str], cosines: Mapping[str, Sequence[tuple[int, float]]]
) -> None:
    """Draw the cosine of each rule over training steps, in the colours of its rate."""
    for index, rule in enumerate(rules):
        points = cosines.get(rule, ())
        steps = [step for step, _ in points]
        values = [value for _, value in points]
        axes.plot(steps, values, **series(index))
    axes.set_xlabel("training step")
    axes.set_ylabel("cosine of delayed and fresh gradients")
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))

"""Accuracy, or loss, over epochs."""

from collections.abc import Mapping, Sequence
from math import isnan, nan
from statistics import mean
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from toolkit.errors import UserError
from toolkit.figures.style import BLACK, DASHES, MARKERS, SERIES, drawing, style
from toolkit.format import SIZES, unit_for
from toolkit.metric import ACCURACY, LOSS, Metric

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve

_LEGEND = 28  # characters in a line of it

Curves = Mapping[str, Sequence[Sequence[float]]]
"""By rule, one sequence a run: a value after each epoch."""


def accuracy(curves: Curves) -> Figure:
    """Test accuracy over epochs: the mean of each rule's runs, and the band that they span.

    Args:
        curves: by rule, one sequence a run: accuracy (a share) after each epoch; NaN where a run
            has diverged, which is left out from there on.

    Raises:
        UserError: there is no rule, a rule has no runs, or they differ in their epochs.
    """
    factor = ACCURACY.factor
    shown = {rule: [[factor * x for x in run] for run in runs] for rule, runs in curves.items()}
    return over_epochs(shown, ACCURACY)


def loss(curves: Curves) -> Figure:
    """Test loss over epochs: the mean of each rule's runs, and the band that they span.

    Args:
        curves: by rule, one sequence a run: loss in nats after each epoch; NaN where a run has
            diverged, which is left out from there on.

    Raises:
        UserError: there is no rule, a rule has no runs, or they differ in their epochs.
    """
    return over_epochs(curves, LOSS)


def over_epochs(curves: Curves, by: Metric) -> Figure:
    """A test metric over epochs, drawn as :func:`accuracy` is.

    Args:
        curves: as of :func:`accuracy`, but in the metric's unit.
        by: the metric.

    Raises:
        UserError: see :func:`accuracy`.
    """
    if not curves or not all(curves.values()):
        without = ", ".join(rule for rule, runs in curves.items() if not runs) or "any rule"
        raise UserError(f"there are no runs of {without} to draw")
    for rule, runs in curves.items():
        if len(lengths := sorted({len(run) for run in runs})) > 1:
            raise UserError(f"runs of {rule} differ in their epochs: got {lengths}; cut the longer")
    with style():
        figure = drawing((5.2, 2.6))
        axes = figure.subplots()
        for k, (rule, runs) in enumerate(curves.items()):
            # Runs that have diverged are left out; NaN if all have
            by_epoch = [
                [value for value in values if not isnan(value)] or [nan]
                for values in zip(*runs, strict=True)
            ]
            epochs = range(1, len(by_epoch) + 1)
            colour = SERIES[k % len(SERIES)]
            low, high = [min(v) for v in by_epoch], [max(v) for v in by_epoch]
            axes.fill_between(epochs, low, high, color=colour, alpha=0.18, linewidth=0)
            means, label = [mean(v) for v in by_epoch], fill(rule, _LEGEND)
            line = axes.plot(epochs, means, color=colour, label=label)[0]
            line.set_marker(MARKERS[k % len(MARKERS)])
            line.set_linestyle(DASHES[k // len(SERIES) % len(DASHES)])
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {by.name} ({by.unit})")
        if by is ACCURACY:
            axes.set_ylim(top=min(101, axes.get_ylim()[1]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # right of the lines
        return figure


def memory_curves(curve: "MemoryCurve", workers: Sequence[int], title: str = "") -> Figure:
    """Activations of a worker over one training step: simultaneous and staggered.

    Args:
        curve: the memory of one micro-batch.
        workers: numbers of shifted workers, a line each.
        title: names the model and the time axis.
    """
    unit, name = unit_for(curve.peak, SIZES)
    colours = [colour for colour in SERIES if colour != BLACK]
    with style():
        figure = drawing((5.6, 2.6))
        axes = figure.subplots()
        period = curve.edges[-1]
        axes.stairs(
            curve.levels / unit, curve.edges / period, color=BLACK, label="together", baseline=None
        )
        for k, n in enumerate(workers):
            times, total = curve.shifted(n)
            axes.stairs(
                total / n / unit,
                np.append(times, period) / period,
                color=colours[k % len(colours)],
                linestyle=DASHES[k // len(colours) % len(DASHES)],
                label=f"N = {n}, shifted: {-curve.reduction(n):z.1%}",
                baseline=None,
            )
        mean = curve.mean / unit
        axes.axhline(mean, color=BLACK, linewidth=0.8, linestyle=":", zorder=3, label="mean")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05 * curve.peak / unit)
        axes.set_xlabel("time (training steps)")
        axes.set_ylabel(f"activations a worker ({name})")
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # right of the lines
        axes.set_title(fill(title, 54))
        return figure

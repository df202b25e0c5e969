"""Curves: accuracy or loss over epochs, and activations over a training step."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from toolkit.errors import UserError
from toolkit.figures.style import BLACK, MARKERS, drawing, legend_right, series
from toolkit.format import SIZES, unit_for
from toolkit.metric import ACCURACY, LOSS, Metric

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve

_LAST_EPOCHS = 9  # or more: the last third is also drawn larger
_MOST_POINTS = 500  # of a line, at even distances; a page with all of 100,000 epochs has 28 MB
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
    """Test loss over epochs, drawn as :func:`accuracy` is.

    Args:
        curves: by rule, one sequence a run: loss in nats after each epoch.
    """
    return over_epochs(curves, LOSS)


def over_epochs(curves: Curves, by: Metric) -> Figure:
    """A test metric over epochs, drawn as :func:`accuracy` is.

    Args:
        curves: by rule, one sequence a run, in the metric's unit.
        by: the metric.
    """
    if not curves or not all(curves.values()):
        without = ", ".join(rule for rule, runs in curves.items() if not runs) or "any rule"
        raise UserError(f"there are no runs of {without} to draw")
    for rule, runs in curves.items():
        if len(lengths := sorted({len(run) for run in runs})) > 1:
            raise UserError(f"runs of {rule} differ in their epochs: got {lengths}; cut the longer")
    with drawing((5.2, 2.6)) as figure:
        axes = figure.subplots()
        n_epochs = max(len(run) for runs in curves.values() for run in runs)
        last = 2 * n_epochs // 3
        # Diverged runs are masked; an epoch without others is masked as a whole
        found = {k: np.ma.masked_invalid(np.array(v, dtype=float)) for k, v in curves.items()}
        everywhere, ends = (
            np.ma.concatenate([values.mean(0)[first:] for values in found.values()])
            for first in (0, last)
        )
        shown = [axes]
        # Ends that lie far apart need no magnifying, and would run below it.
        if n_epochs >= _LAST_EPOCHS and np.ma.ptp(ends) < np.ma.ptp(everywhere) / 2:
            shown.append(axes.inset_axes((0.45, 0.1 if by is ACCURACY else 0.52, 0.53, 0.42)))
            shown[1].tick_params(labelsize=6)
            shown[1].set_title("the last epochs", fontsize=6, pad=2)
        for k, (rule, values) in enumerate(found.items()):
            low, mean, high = (of(0).filled(np.nan) for of in (values.min, values.mean, values.max))
            line = series(k)
            look = {"marker": MARKERS[k % len(MARKERS)], "label": fill(rule, 28), **line}
            for panel, first in zip(shown, (0, last), strict=False):
                n_points = min(len(mean) - first, _MOST_POINTS)
                at = np.linspace(first, len(mean) - 1, n_points).round().astype(int)
                band = {"color": line["color"], "alpha": 0.18, "linewidth": 0}
                panel.fill_between(at + 1, low[at], high[at], **band)
                panel.plot(at + 1, mean[at], **look)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {by.name} ({by.unit})")
        if by is ACCURACY:
            axes.set_ylim(top=min(101, axes.get_ylim()[1]))
        for panel in shown:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        legend_right(axes)
    return figure


def memory_curves(curve: "MemoryCurve", workers: Sequence[int], title: str = "") -> Figure:
    """Activations of a worker over one training step: simultaneous and staggered.

    Args:
        curve: the memory of one micro-batch.
        workers: numbers of shifted workers, a line each.
        title: names the model and the time axis.
    """
    unit, name = unit_for(curve.peak, SIZES)
    period = curve.edges[-1]
    with drawing((5.6, 2.6)) as figure:
        axes = figure.subplots()
        levels, edges = curve.levels / unit, curve.edges / period
        axes.stairs(levels, edges, color=BLACK, label="together", baseline=None)
        for k, n in enumerate(workers):
            times, total = curve.shifted(n)
            label = f"N = {n}, shifted: {-curve.reduction(n):z.1%}"
            edges = np.append(times, period) / period
            look = series(k, 6)  # without black
            axes.stairs(total / n / unit, edges, label=label, baseline=None, **look)
        axes.axhline(curve.mean / unit, color=BLACK, lw=0.8, ls=":", label="mean", zorder=3)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05 * curve.peak / unit)
        axes.set_xlabel("time (training steps)")
        axes.set_ylabel(f"activations a worker ({name})")
        legend_right(axes)
        axes.set_title(fill(title, 54))
    return figure

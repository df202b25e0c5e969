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
    """Draw test accuracy over epochs: the mean of each rule's runs, and the band that they span.

    Args:
        curves: by rule, one sequence a run: accuracy (a share) after each epoch; NaN where a run
            has diverged, which is left out from there on.

    Raises:
        UserError: there is no rule, a rule has no runs, or they differ in their epochs.
    """
    factor = ACCURACY.factor
    percentages = {
        rule: [[factor * share for share in run] for run in runs] for rule, runs in curves.items()
    }
    return over_epochs(percentages, ACCURACY)


def loss(curves: Curves) -> Figure:
    """Draw test loss over epochs, as :func:`accuracy` does.

    Args:
        curves: by rule, one sequence a run: loss in nats after each epoch.
    """
    return over_epochs(curves, LOSS)


def over_epochs(curves: Curves, by: Metric) -> Figure:
    """Draw a test metric over epochs, as :func:`accuracy` does.

    Args:
        curves: by rule, one sequence a run, in the metric's unit.
        by: the metric.
    """
    if not curves or not all(curves.values()):
        rules_without_runs = (
            ", ".join(rule for rule, runs in curves.items() if not runs) or "any rule"
        )
        raise UserError(f"there are no runs of {rules_without_runs} to draw")
    for rule, runs in curves.items():
        if len(lengths := sorted({len(run) for run in runs})) > 1:
            raise UserError(f"runs of {rule} differ in their epochs: got {lengths}; cut the longer")
    with drawing((5.2, 2.6)) as figure:
        axes = figure.subplots()
        n_epochs = max(len(run) for runs in curves.values() for run in runs)
        last_third = 2 * n_epochs // 3
        # Diverged runs are masked. An epoch in which all runs of a rule have diverged has no mean.
        values_of_rule = {
            rule: np.ma.masked_invalid(np.array(runs, dtype=float)) for rule, runs in curves.items()
        }
        all_means, last_means = (
            np.ma.concatenate([values.mean(0)[first_epoch:] for values in values_of_rule.values()])
            for first_epoch in (0, last_third)
        )
        panels = [axes]
        # An inset magnifies the last epochs if their means lie close together. Lines that end far
        # apart need none, and would run below it.
        if n_epochs >= _LAST_EPOCHS and np.ma.ptp(last_means) < np.ma.ptp(all_means) / 2:
            panels.append(axes.inset_axes((0.45, 0.1 if by is ACCURACY else 0.52, 0.53, 0.42)))
            panels[1].tick_params(labelsize=6)
            panels[1].set_title("the last epochs", fontsize=6, pad=2)
        for index, (rule, values) in enumerate(values_of_rule.items()):
            low, mean, high = (
                reduce(0).filled(np.nan) for reduce in (values.min, values.mean, values.max)
            )
            line_style = series(index)
            point_style = {
                "marker": MARKERS[index % len(MARKERS)],
                "label": fill(rule, 28),
                **line_style,
            }
            for panel, first_epoch in zip(panels, (0, last_third), strict=False):
                n_points = min(len(mean) - first_epoch, _MOST_POINTS)
                epochs = np.linspace(first_epoch, len(mean) - 1, n_points).round().astype(int)
                band_style = {"color": line_style["color"], "alpha": 0.18, "linewidth": 0}
                panel.fill_between(epochs + 1, low[epochs], high[epochs], **band_style)
                panel.plot(epochs + 1, mean[epochs], **point_style)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {by.name} ({by.unit})")
        if by is ACCURACY:
            axes.set_ylim(top=min(101, axes.get_ylim()[1]))
        for panel in panels:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        legend_right(axes)
    return figure


def memory_curves(curve: "MemoryCurve", workers: Sequence[int], title: str = "") -> Figure:
    """Draw the activations of a worker over one training step: simultaneous and staggered.

    Args:
        curve: the memory of one micro-batch.
        workers: numbers of shifted workers, a line each.
        title: names the model and the time axis.
    """
    unit, unit_name = unit_for(curve.peak, SIZES)
    period = curve.edges[-1]
    with drawing((5.6, 2.6)) as figure:
        axes = figure.subplots()
        simultaneous, edges = curve.levels / unit, curve.edges / period
        axes.stairs(simultaneous, edges, color=BLACK, label="together", baseline=None)
        for index, n_workers in enumerate(workers):
            times, total = curve.shifted(n_workers)
            label = f"N = {n_workers}, shifted: {-curve.reduction(n_workers):z.1%}"
            edges = np.append(times, period) / period
            line_style = series(index, 6)  # without black
            axes.stairs(total / n_workers / unit, edges, label=label, baseline=None, **line_style)
        axes.axhline(curve.mean / unit, color=BLACK, lw=0.8, ls=":", label="mean", zorder=3)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05 * curve.peak / unit)
        axes.set_xlabel("time (training steps)")
        axes.set_ylabel(f"activations a worker ({unit_name})")
        legend_right(axes)
        axes.set_title(fill(title, 54))
    return figure

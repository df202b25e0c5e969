"""Curves: accuracy or loss over epochs, and activations over a training step."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from toolkit.errors import UserError
from toolkit.figures.style import BLACK, MARKERS, drawing, legend_right, series
from toolkit.format import SIZES, unit_for
from toolkit.metric import ACCURACY, LOSS, Metric

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve

_LAST_EPOCHS = 9  # or more: the last third is also drawn larger
# Of a line, at even distances; a page with all of 100,000 epochs has 28 MB.
_MOST_POINTS = 500
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
    percentages: dict[str, list[list[float]]] = {}
    for rule, runs in curves.items():
        percentages[rule] = []
        for run in runs:
            percentages[rule].append([ACCURACY.factor * share for share in run])
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
    _check(curves)
    # Diverged runs are masked. An epoch in which all runs of a rule have diverged has no mean.
    masked_runs = {
        rule: np.ma.masked_invalid(np.array(runs)) for rule, runs in curves.items()
    }
    means = [values.mean(0) for values in masked_runs.values()]
    n_epochs = max(map(len, means))
    # Over all rules, since they share the axes: the inset pays if the end is much narrower.
    last_third = 2 * n_epochs // 3
    spread = np.ma.ptp(np.ma.concatenate(means))
    last_spread = np.ma.ptp(np.ma.concatenate([mean[last_third:] for mean in means]))
    # The legend of many rules would leave no height to the curves.
    n_legend_lines = sum(_label(rule).count("\n") + 1 for rule in curves)
    with drawing((5.2, max(2.6, 0.2 * n_legend_lines))) as figure:
        axes = figure.subplots()
        panels = [axes]
        # An inset magnifies the last epochs if their means lie close together. Lines that end far
        # apart need none, and would run below it.
        if n_epochs >= _LAST_EPOCHS and last_spread < spread / 2:
            # Accuracies rise, so the lower right is free; losses fall, and the upper right is.
            panels.append(
                axes.inset_axes((0.45, 0.1 if by is ACCURACY else 0.52, 0.53, 0.42))
            )
            panels[1].tick_params(labelsize=6)
            panels[1].set_title("the last epochs", fontsize=6, pad=2)
        for index, (rule, values) in enumerate(masked_runs.items()):
            for panel, first_epoch in zip(panels, (0, last_third), strict=False):
                _draw_rule(panel, rule, index, values, first_epoch)
        axes.set_xlabel("epoch")
        axes.set_ylabel(f"test {by.name} ({by.unit})")
        if by is ACCURACY:
            # A little above 100, so that a curve at the top is not cut in half.
            axes.set_ylim(top=min(101, axes.get_ylim()[1]))
        for panel in panels:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        # An empty band for the legend: those of the rules have the rules' colours.
        if any(len(values) > 1 for values in masked_runs.values()):
            axes.fill_between(
                [], [], color="grey", alpha=0.3, linewidth=0, label="all seeds"
            )
        legend_right(axes)
    return figure


def _check(curves: Curves) -> None:
    """Raise UserError if there is nothing to draw, or runs of a rule differ in length."""
    rules_without_runs = [rule for rule, runs in curves.items() if not len(runs)]
    if rules_without_runs or not curves:
        names = ", ".join(rules_without_runs) or "any rule"
        raise UserError(f"there are no runs of {names} to draw")
    for rule, runs in curves.items():
        lengths = sorted({len(run) for run in runs})
        if len(lengths) > 1:
            raise UserError(
                f"runs of {rule} differ in their epochs: got {lengths}; cut the longer"
            )


def _draw_rule(
    axes: Axes,
    rule: str,
    index: int,
    values: "np.ma.MaskedArray[Any, Any]",
    first_epoch: int,
) -> None:
    """Draw the mean of a rule's runs, and the band that they span, from ``first_epoch`` on."""
    n_epochs = values.shape[1]
    n_points = min(n_epochs - first_epoch, _MOST_POINTS)
    # At even distances, the first and the last epoch included.
    epochs = np.linspace(first_epoch, n_epochs - 1, n_points).round().astype(int)
    low = values.min(0).filled(np.nan)[epochs]
    mean = values.mean(0).filled(np.nan)[epochs]
    high = values.max(0).filled(np.nan)[epochs]
    line_style = series(index)
    axes.fill_between(
        epochs + 1, low, high, color=line_style["color"], alpha=0.18, linewidth=0
    )
    marker = MARKERS[index % len(MARKERS)]
    axes.plot(epochs + 1, mean, marker=marker, label=_label(rule), **line_style)


def _label(rule: str) -> str:
    """Return the name of a rule in lines that fit a legend at the right."""
    return fill(rule, 28)


def memory_curves(
    curve: "MemoryCurve", workers: Sequence[int], title: str = ""
) -> Figure:
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
        edges = curve.edges / period
        axes.stairs(
            curve.levels / unit,
            edges,
            color=BLACK,
            label="at the same moment",
            baseline=None,
        )
        for index, n_workers in enumerate(workers):
            times, total = curve.shifted(n_workers)
            label = f"N = {n_workers}, shifted: {-curve.reduction(n_workers):z.1%}"
            # Times of a shifted sum start within the period; the last level holds until its end.
            edges = np.append(times, period) / period
            line_style = series(index, 6)  # without black
            axes.stairs(
                total / n_workers / unit,
                edges,
                label=label,
                baseline=None,
                **line_style,
            )
        axes.axhline(
            curve.mean / unit, color=BLACK, lw=0.8, ls=":", label="mean", zorder=3
        )
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.05 * curve.peak / unit)
        axes.set_xlabel("time (training steps)")
        axes.set_ylabel(f"activations per worker ({unit_name})")
        legend_right(axes)
        axes.set_title(fill(title, 54))
    return figure

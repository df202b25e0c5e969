"""Memory of shifted workers over time."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from toolkit.figures.style import BLACK, SERIES, drawing, style
from toolkit.units import GIB

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve


def memory_curves(curve: "MemoryCurve", workers: Sequence[int], title: str = "") -> Figure:
    """Activations a worker over one training step: all workers together, and shifted uniformly.

    Args:
        curve: the memory of one micro-batch.
        workers: numbers of shifted workers, a line each.
        title: names the model and the time axis.
    """
    with style():
        figure = drawing((3.9, 2.8))
        axes = figure.subplots()
        period = curve.edges[-1]
        axes.stairs(
            curve.levels / GIB, curve.edges / period, color=BLACK, label="together", baseline=None
        )
        for k, n in enumerate(workers):
            times, total = curve.shifted(n)
            edges = np.append(times, period) / period
            label = f"N = {n}, shifted: {-curve.reduction(n):.1%}"
            colour = SERIES[k % len(SERIES)]
            axes.stairs(total / n / GIB, edges, color=colour, label=label, baseline=None)
        mean = curve.mean / GIB
        axes.axhline(mean, color=BLACK, linewidth=0.8, linestyle=":", zorder=3, label="mean")
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 1.45 * curve.peak / GIB)
        axes.set_xlabel("time (training steps)")
        axes.set_ylabel("activations a worker (GiB)")
        axes.legend(loc="upper center", ncols=2, columnspacing=1)
        axes.set_title(fill(title, 54))
        return figure

"""Memory of shifted workers over time."""

from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from toolkit.figures.style import BLACK, DASHES, SERIES, drawing, style
from toolkit.format import SIZES, unit_for

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve


def memory_curves(curve: "MemoryCurve", workers: Sequence[int], title: str = "") -> Figure:
    """Activations a worker over one training step: all workers together, and shifted uniformly.

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
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside, not over the lines
        axes.set_title(fill(title, 54))
        return figure

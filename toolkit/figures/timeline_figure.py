"""Timelines, predicted or measured: what runs when, memory and traffic."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from toolkit.errors import UserError
from toolkit.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    YELLOW,
    align,
    drawing,
)  # fmt: skip
from toolkit.format import RATES, SIZES, TIMES, unit_for

if TYPE_CHECKING:
    from toolkit.cost import Timeline

_BINS = 120  # of traffic over time
_THIN = 0.006  # of the time axis: bars that a line around them would hide
_OPS = {"F": SKY, "B": ORANGE, "I": ORANGE, "W": YELLOW, "p": BLUE}
_SELDOM = {"W": "backward of weights", "p": "prediction"}
_KINDS = {
    "optimizer": YELLOW,
    "weights": "#999999",
    "gradients": GREEN,
    "stage inputs": SKY,
    "activations": BLUE,
    "working": ORANGE,
}
_PLACES = {  # of a lane in its rank's row: lower end and height
    "compute": (-0.42, 0.5), "update": (0.09, 0.07), "send": (0.17, 0.12), "receive": (0.3, 0.12),
}  # fmt: skip
_LANES = {"update": GREEN, "send": PURPLE, "receive": VERMILION}


def timelines(shown: "Timeline | Sequence[Timeline]") -> Figure:
    """Draw one column a timeline: its ranks, their memory and their traffic, over time.

    A rank has a row: computing on top, below it updates, and what its port sends and receives.
    Memory is of the fullest rank, by its contents; traffic is what all ranks send. Time, memory and
    traffic have one scale in all columns.

    Args:
        shown: timelines, from left to right.

    Raises:
        UserError: there is no timeline.
    """
    shown = shown if isinstance(shown, Sequence) else [shown]
    if not shown:
        raise UserError("there is no timeline to draw: give one, or several")
    n_ranks = max(timeline.n_ranks for timeline in shown)
    end = max(timeline.end for timeline in shown)
    unit, time_name = unit_for(end, TIMES)
    rates = [bytes_sent_by_bin(timeline) * _BINS / timeline.end for timeline in shown]
    fastest = max(rate.max() for rate in rates)
    traffic_unit, traffic_name = unit_for(fastest, RATES)
    with drawing((3.6 * len(shown) + 0.4, min(8.0, 3.0 + 0.22 * n_ranks))) as figure:
        heights = (max(2.0, 0.45 * n_ranks), 1.9, 1)
        panels = figure.subplots(3, len(shown), squeeze=False, height_ratios=heights, sharex=True)
        panels[2, 0].set_xlim(0, end / unit)
        for timeline, rate, rank_axes, traffic_axes in zip(
            shown, rates, panels[0], panels[2], strict=True
        ):
            _draw_ranks(rank_axes, timeline, unit)
            rank_axes.set_title(timeline.name)
            edges = np.linspace(0, timeline.end / unit, _BINS + 1)
            traffic_axes.stairs(rate / traffic_unit, edges, fill=True, color=PURPLE, alpha=0.8)
            traffic_axes.set_ylim(0, 1.1 * fastest / traffic_unit or None)
            traffic_axes.set_xlabel(f"time ({time_name})")
            traffic_axes.tick_params(labelleft=traffic_axes is panels[2, 0])
        align(panels[0], [("rank", timeline.n_ranks) for timeline in shown])
        panels[2, 0].set_ylabel(f"sent\n({traffic_name})")
        _draw_memories(panels[1], shown, unit)
        keys = _keys(shown)
        ncols = len(keys) if len(keys) <= (6 if len(shown) > 1 else 5) else 3
        figure.legend(handles=keys, loc="outside lower center", ncols=ncols, columnspacing=1)
    return figure


def _keys(timelines: "Sequence[Timeline]") -> list[Patch]:
    """Return the legend's entries; a rare op has one only if it is drawn."""
    spans = (span for timeline in timelines for span in timeline.spans)
    computed_kinds = {span.computed for span in spans if span.lane == "compute"}
    keys = {"forward": SKY, "backward": ORANGE}
    keys |= {
        label: _OPS[kind] for kind, label in _SELDOM.items() if kind in computed_kinds
    } | _LANES
    return [Patch(color=colour, label=label) for label, colour in keys.items()]


def _draw_ranks(axes: Axes, timeline: "Timeline", unit: float) -> None:
    """Draw a row a rank: ops, updates, and what it sends and receives.

    Time is in ``unit`` seconds.
    """
    bars: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        colour = _LANES.get(span.lane) or _OPS[span.computed]
        bar = span.start / unit, (span.end - span.start) / unit
        bars[span.rank, span.lane, colour].append(bar)
    for (rank, lane, colour), spans in bars.items():
        offset, height = _PLACES[lane]
        is_wide = median(width for _, width in spans) > _THIN * axes.get_xlim()[1]
        # An edge of the bar's own colour keeps thin bars visible; wide ones get a white edge.
        bar_style: dict[str, Any] = {"edgecolor": colour, "linewidth": 0.1}
        if lane == "compute" and is_wide:
            bar_style = {"edgecolor": "white", "linewidth": 0.3}
        axes.broken_barh(spans, (rank + offset, height), facecolors=colour, **bar_style)
    axes.tick_params(length=0, labelbottom=False)


def _draw_memories(panels: Sequence[Axes], timelines: "Sequence[Timeline]", unit: float) -> None:
    """Draw the memory of each timeline's fullest rank, stacked by its contents."""
    peaks = [
        [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)] for timeline in timelines
    ]
    fullest = max(map(max, peaks))
    memory_unit, unit_name = unit_for(fullest, SIZES)
    for axes, timeline, rank_peaks in zip(panels, timelines, peaks, strict=True):
        curves = [timeline.memory(rank_peaks.index(max(rank_peaks)), kind) for kind in _KINDS]
        times = np.unique(
            [change_time for curve in curves for change_time, _ in curve] + [timeline.end]
        )
        bottom = np.zeros(len(times))
        area_style: dict[str, Any] = {"step": "post", "alpha": 0.6, "linewidth": 0}
        for (kind, colour), curve in zip(_KINDS.items(), curves, strict=True):
            if not any(held_bytes for _, held_bytes in curve):
                continue
            change_times, levels = np.array(curve).T
            # The level at each time is that of the last change before it; before the first, 0.
            indices = np.searchsorted(change_times, times, side="right") - 1
            top = bottom + np.where(indices >= 0, levels[indices] / memory_unit, 0.0)
            axes.fill_between(times / unit, bottom, top, color=colour, label=kind, **area_style)
            bottom = top
        axes.legend(loc="upper center", ncols=3, fontsize=6, columnspacing=0.8, handlelength=0.8)
        axes.set_ylim(0, 1.7 * fullest / memory_unit or None)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel(f"fullest\nrank ({unit_name})")


def bytes_sent_by_bin(timeline: "Timeline") -> NDArray[np.float64]:
    """Return the bytes that all ranks send in each of equal bins of the time."""
    edges = np.linspace(0, timeline.end, _BINS + 1)
    sent_bytes = np.zeros(_BINS)
    for span in timeline.spans:
        if span.lane != "send" or not span.bytes:
            continue
        first_bin, last_bin = (
            min(_BINS - 1, int(time / edges[1])) for time in (span.start, span.end)
        )
        bins = np.arange(first_bin, last_bin + 1)
        overlap = np.minimum(edges[bins + 1], span.end) - np.maximum(edges[bins], span.start)
        share = overlap / overlap.sum() if first_bin < last_bin else 1.0  # a span may last no time
        sent_bytes[bins] += span.bytes * share
    return sent_bytes

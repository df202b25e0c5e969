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
)
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
# Offsets from the middle of the row; a row is 1 high, and the first one is on top:
#
#     -0.42  +----------------+
#            |  compute       |
#     +0.08  +----------------+
#     +0.09   update
#     +0.17   send
#     +0.30   receive
_PLACES = {  # of a lane in its rank's row: lower end and height
    "compute": (-0.42, 0.5),
    "update": (0.09, 0.07),
    "send": (0.17, 0.12),
    "receive": (0.3, 0.12),
}
_LANES = {"update": GREEN, "send": PURPLE, "receive": VERMILION}


def timelines(drawn: "Timeline | Sequence[Timeline]") -> Figure:
    """Draw one column a timeline: its ranks, their memory and their traffic, over time.

    A rank has a row: computing on top, below it updates, and what its port sends and receives.
    Memory is of the fullest rank, by its contents; traffic is what all ranks send. Time, memory and
    traffic have one scale in all columns.

    Args:
        drawn: timelines, from left to right.

    Raises:
        UserError: there is no timeline.
    """
    drawn = drawn if isinstance(drawn, Sequence) else [drawn]
    if not drawn:
        raise UserError("there is no timeline to draw: give one, or several")
    n_ranks = max(timeline.n_ranks for timeline in drawn)
    end = max(timeline.end for timeline in drawn)
    unit, unit_name = unit_for(end, TIMES)
    with drawing((3.6 * len(drawn) + 0.4, min(8.0, 3.0 + 0.22 * n_ranks))) as figure:
        rank_panels, memory_panels, traffic_panels = figure.subplots(
            3,
            len(drawn),
            squeeze=False,
            height_ratios=(max(2.0, 0.45 * n_ranks), 1.9, 1),
            sharex=True,
        )
        # Shared by all panels, and set first: how bars are drawn depends on it.
        traffic_panels[0].set_xlim(0, end / unit)
        _draw_traffic(traffic_panels, drawn, unit)
        for rank_axes, traffic_axes, timeline in zip(
            rank_panels, traffic_panels, drawn, strict=True
        ):
            _draw_ranks(rank_axes, timeline, unit)
            rank_axes.set_title(timeline.name)
            traffic_axes.set_xlabel(f"time ({unit_name})")
        align(rank_panels, [("rank", timeline.n_ranks) for timeline in drawn])
        _draw_memories(memory_panels, drawn, unit)
        keys = _keys(drawn)
        fit_in_one_line = len(keys) <= (6 if len(drawn) > 1 else 5)
        n_columns = len(keys) if fit_in_one_line else 3
        figure.legend(
            handles=keys, loc="outside lower center", ncols=n_columns, columnspacing=1
        )
    return figure


def _keys(timelines: "Sequence[Timeline]") -> list[Patch]:
    """Return the legend's entries; a rare op has one only if it is drawn."""
    computed_kinds = set()
    for timeline in timelines:
        computed_kinds |= {
            span.computed for span in timeline.spans if span.lane == "compute"
        }
    colour_of_label = {"forward": SKY, "backward": ORANGE}
    for kind, label in _SELDOM.items():
        if kind in computed_kinds:
            colour_of_label[label] = _OPS[kind]
    colour_of_label |= _LANES
    return [
        Patch(color=colour, label=label) for label, colour in colour_of_label.items()
    ]


def _draw_ranks(axes: Axes, timeline: "Timeline", unit: float) -> None:
    """Draw a row per rank: ops, updates, and what it sends and receives.

    Time is in ``unit`` seconds.
    """
    # All bars of a rank, lane and colour are one artist: one each would take minutes to draw.
    bars: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(
        list
    )
    for span in timeline.spans:
        colour = _LANES.get(span.lane) or _OPS[span.computed]
        bar = span.start / unit, (span.end - span.start) / unit
        bars[span.rank, span.lane, colour].append(bar)
    for (rank, lane, colour), lane_bars in bars.items():
        offset, height = _PLACES[lane]
        median_width = median(width for _, width in lane_bars)
        # An edge of the bar's own colour keeps thin bars visible; wide ones get a white edge.
        edge: dict[str, Any] = {"edgecolor": colour, "linewidth": 0.1}
        if lane == "compute" and median_width > _THIN * axes.get_xlim()[1]:
            edge = {"edgecolor": "white", "linewidth": 0.3}
        axes.broken_barh(lane_bars, (rank + offset, height), facecolors=colour, **edge)
    axes.tick_params(length=0, labelbottom=False)


def _draw_traffic(
    panels: Sequence[Axes], timelines: "Sequence[Timeline]", unit: float
) -> None:
    """Draw the bytes a second that all ranks of each timeline send."""
    # Bytes of a bin divided by its length, which is a share 1/_BINS of the timeline.
    rates = [
        bytes_sent_by_bin(timeline) * _BINS / timeline.end for timeline in timelines
    ]
    fastest = max(rate.max() for rate in rates)
    traffic_unit, unit_name = unit_for(fastest, RATES)
    for axes, timeline, rate in zip(panels, timelines, rates, strict=True):
        edges = np.linspace(0, timeline.end / unit, _BINS + 1)
        axes.stairs(rate / traffic_unit, edges, fill=True, color=PURPLE, alpha=0.8)
        # Without traffic the limit would be 0; None leaves it to matplotlib.
        axes.set_ylim(0, 1.1 * fastest / traffic_unit or None)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel(f"sent\n({unit_name})")


def _draw_memories(
    panels: Sequence[Axes], timelines: "Sequence[Timeline]", unit: float
) -> None:
    """Draw the memory of each timeline's fullest rank, stacked by its contents."""
    fullest_ranks = []
    peaks = []
    for timeline in timelines:
        rank_peaks = [timeline.peak_memory(rank) for rank in range(timeline.n_ranks)]
        peaks.append(max(rank_peaks))
        fullest_ranks.append(rank_peaks.index(max(rank_peaks)))
    fullest = max(peaks)
    memory_unit, unit_name = unit_for(fullest, SIZES)
    for axes, timeline, rank in zip(panels, timelines, fullest_ranks, strict=True):
        _draw_memory(axes, timeline, rank, unit, memory_unit)
        axes.legend(
            loc="upper center", ncols=3, fontsize=6, columnspacing=0.8, handlelength=0.8
        )
        # The upper part is for the legend of the contents.
        axes.set_ylim(0, 1.7 * fullest / memory_unit or None)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel(f"fullest\nrank ({unit_name})")


def _draw_memory(
    axes: Axes, timeline: "Timeline", rank: int, unit: float, memory_unit: float
) -> None:
    """Draw the memory of a rank, stacked by its contents."""
    curves = {kind: timeline.memory(rank, kind) for kind in _KINDS}
    # A stack needs the level of every kind at every change of any of them.
    change_times = {timeline.end}
    for curve in curves.values():
        change_times |= {time for time, _ in curve}
    times = np.array(sorted(change_times))
    bottom = np.zeros(len(times))
    for kind, curve in curves.items():
        if not any(n_bytes for _, n_bytes in curve):
            continue
        starts, levels = np.array(curve).T
        # The level at each time is that of the last change before it; before the first, 0.
        indices = np.searchsorted(starts, times, side="right") - 1
        top = bottom + np.where(indices >= 0, levels[indices] / memory_unit, 0.0)
        axes.fill_between(
            times / unit,
            bottom,
            top,
            color=_KINDS[kind],
            label=kind,
            step="post",
            alpha=0.6,
            linewidth=0,
        )
        bottom = top


def bytes_sent_by_bin(timeline: "Timeline") -> NDArray[np.float64]:
    """Return the bytes that all ranks send in each of equal bins of the time."""
    edges = np.linspace(0, timeline.end, _BINS + 1)
    sent_bytes = np.zeros(_BINS)
    for span in timeline.spans:
        if span.lane != "send" or not span.bytes:
            continue
        first_bin = min(_BINS - 1, int(span.start / edges[1]))
        last_bin = min(_BINS - 1, int(span.end / edges[1]))
        bins = np.arange(first_bin, last_bin + 1)
        # A message that lasts for several bins is shared out by the time it spends in each.
        overlap = np.minimum(edges[bins + 1], span.end) - np.maximum(
            edges[bins], span.start
        )
        # A span may last no time.
        share = overlap / overlap.sum() if first_bin < last_bin else 1.0
        sent_bytes[bins] += span.bytes * share
    return sent_bytes

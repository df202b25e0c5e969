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
    """One column a timeline: its ranks, their memory and their traffic, over time.

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
    unit, name = unit_for(end, TIMES)
    rates = [bytes_sent_by_bin(t) * _BINS / t.end for t in shown]
    fastest = max(rate.max() for rate in rates)
    traffic_unit, traffic_name = unit_for(fastest, RATES)
    with drawing((3.6 * len(shown) + 0.4, min(8.0, 3.0 + 0.22 * n_ranks))) as figure:
        ratios = (max(2.0, 0.45 * n_ranks), 1.9, 1)
        rows = figure.subplots(3, len(shown), squeeze=False, height_ratios=ratios, sharex=True)
        rows[2, 0].set_xlim(0, end / unit)
        for timeline, rate, ranks, traffic in zip(shown, rates, rows[0], rows[2], strict=True):
            _draw_ranks(ranks, timeline, unit)
            ranks.set_title(timeline.name)
            edges = np.linspace(0, timeline.end / unit, _BINS + 1)
            traffic.stairs(rate / traffic_unit, edges, fill=True, color=PURPLE, alpha=0.8)
            traffic.set_ylim(0, 1.1 * fastest / traffic_unit or None)
            traffic.set_xlabel(f"time ({name})")
            traffic.tick_params(labelleft=traffic is rows[2, 0])
        align(rows[0], [("rank", timeline.n_ranks) for timeline in shown])
        rows[2, 0].set_ylabel(f"sent\n({traffic_name})")
        _draw_memories(rows[1], shown, unit)
        keys = _keys(shown)
        ncols = len(keys) if len(keys) <= (6 if len(shown) > 1 else 5) else 3
        figure.legend(handles=keys, loc="outside lower center", ncols=ncols, columnspacing=1)
    return figure


def _keys(shown: "Sequence[Timeline]") -> list[Patch]:
    """What colours mean; a rare one only if it is drawn."""
    spans = (span for timeline in shown for span in timeline.spans)
    done = {span.computed for span in spans if span.lane == "compute"}
    keys = {"forward": SKY, "backward": ORANGE}
    keys |= {label: _OPS[kind] for kind, label in _SELDOM.items() if kind in done} | _LANES
    return [Patch(color=colour, label=label) for label, colour in keys.items()]


def _draw_ranks(axes: Axes, timeline: "Timeline", unit: float) -> None:
    """A row a rank: what it computes, updates, sends and receives; time is in ``unit`` seconds."""
    bars: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        colour = _LANES.get(span.lane) or _OPS[span.computed]
        bar = span.start / unit, (span.end - span.start) / unit
        bars[span.rank, span.lane, colour].append(bar)
    for (rank, lane, colour), spans in bars.items():
        low, height = _PLACES[lane]
        wide = median(width for _, width in spans) > _THIN * axes.get_xlim()[1]
        look: dict[str, Any] = {"edgecolor": colour, "linewidth": 0.1}  # keeps thin bars visible
        if lane == "compute" and wide:
            look = {"edgecolor": "white", "linewidth": 0.3}
        axes.broken_barh(spans, (rank + low, height), facecolors=colour, **look)
    axes.tick_params(length=0, labelbottom=False)


def _draw_memories(panels: Sequence[Axes], shown: "Sequence[Timeline]", unit: float) -> None:
    """The memory of each timeline's fullest rank, stacked by its contents."""
    peaks = [[t.peak_memory(rank) for rank in range(t.n_ranks)] for t in shown]
    fullest = max(map(max, peaks))
    memory_unit, name = unit_for(fullest, SIZES)
    for axes, timeline, peak in zip(panels, shown, peaks, strict=True):
        curves = [timeline.memory(peak.index(max(peak)), kind) for kind in _KINDS]
        times = np.unique([when for curve in curves for when, _ in curve] + [timeline.end])
        below = np.zeros(len(times))
        look: dict[str, Any] = {"step": "post", "alpha": 0.6, "linewidth": 0}
        for (kind, colour), curve in zip(_KINDS.items(), curves, strict=True):
            if not any(held for _, held in curve):
                continue
            when, held = np.array(curve).T
            at = np.searchsorted(when, times, side="right") - 1
            top = below + np.where(at >= 0, held[at] / memory_unit, 0.0)
            axes.fill_between(times / unit, below, top, color=colour, label=kind, **look)
            below = top
        axes.legend(loc="upper center", ncols=3, fontsize=6, columnspacing=0.8, handlelength=0.8)
        axes.set_ylim(0, 1.7 * fullest / memory_unit or None)
        axes.tick_params(labelleft=axes is panels[0])
    panels[0].set_ylabel(f"fullest\nrank ({name})")


def bytes_sent_by_bin(timeline: "Timeline") -> NDArray[np.float64]:
    """Bytes that all ranks send in each of equal bins of the time."""
    edges = np.linspace(0, timeline.end, _BINS + 1)
    sent = np.zeros(_BINS)
    for span in timeline.spans:
        if span.lane != "send" or not span.bytes:
            continue
        first, last = (min(_BINS - 1, int(t / edges[1])) for t in (span.start, span.end))
        bins = np.arange(first, last + 1)
        overlap = np.minimum(edges[bins + 1], span.end) - np.maximum(edges[bins], span.start)
        share = overlap / overlap.sum() if first < last else 1.0  # a span may last no time
        sent[bins] += span.bytes * share
    return sent

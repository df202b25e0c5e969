"""Timelines, predicted or measured: what runs when, memory and traffic."""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

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
    style,
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
_LANES = {"update": GREEN, "send": PURPLE, "receive": VERMILION}


def timelines(shown: "Timeline | Sequence[Timeline]") -> Figure:
    """One column a timeline: its ranks, their memory and their traffic, over time.

    A rank has a row: computing on top, below it updates, and what its port sends and receives.
    Memory is of the fullest rank, by what it is; traffic is what all ranks send. Time, memory and
    traffic have one scale in all columns.

    Raises:
        ValueError: there is no timeline.
    """
    shown = shown if isinstance(shown, Sequence) else [shown]
    if not shown:
        raise UserError("there is no timeline to draw: give one, or several")
    with style():
        n_ranks = max(timeline.n_ranks for timeline in shown)
        height = min(8.0, 3.0 + 0.22 * n_ranks)
        figure = drawing((3.6 * len(shown) + 0.4, height))
        ratios = (max(2.0, 0.45 * n_ranks), 1.9, 1)
        rows = figure.subplots(3, len(shown), squeeze=False, height_ratios=ratios, sharex=True)
        end = max(timeline.end for timeline in shown)
        unit, name = unit_for(end, TIMES)
        peaks = [[t.peak_memory(rank) for rank in range(t.n_ranks)] for t in shown]
        fullest = max(map(max, peaks))
        memory_unit, memory_name = unit_for(fullest, SIZES)
        rates = [rate_of_sending(timeline) for timeline in shown]
        fastest = max(rate.max() for rate in rates)
        traffic_unit, traffic_name = unit_for(fastest, RATES)
        rows[2, 0].set_xlim(0, end / unit)
        for column, timeline in enumerate(shown):
            ranks, memory, traffic = rows[:, column]
            draw_ranks(ranks, timeline, unit)
            rank = peaks[column].index(max(peaks[column]))
            _draw_memory(memory, timeline, rank, unit, memory_unit)
            memory.set_ylim(0, 1.7 * fullest / memory_unit or None)
            draw_traffic(traffic, rates[column] / traffic_unit, timeline.end / unit)
            traffic.set_ylim(0, 1.1 * fastest / traffic_unit or None)
            ranks.set_title(timeline.name)
            traffic.set_xlabel(f"time ({name})")
            for axes in (memory, traffic):
                axes.tick_params(labelleft=not column)
        align(rows[0], [("rank", timeline.n_ranks) for timeline in shown])
        rows[1, 0].set_ylabel(f"fullest\nrank ({memory_name})")
        rows[2, 0].set_ylabel(f"sent\n({traffic_name})")
        add_keys(figure, shown, most=6 if len(shown) > 1 else 5)
        return figure


def add_keys(figure: Figure, shown: "Sequence[Timeline]", most: int) -> None:
    """A legend of what ranks do, ``most`` in a line; what they seldom do, if they do it."""
    keys = {"forward": SKY, "backward": ORANGE}
    spans = (span for timeline in shown for span in timeline.spans)
    done = {span.computed for span in spans if span.lane == "compute"}
    keys |= {label: _OPS[kind] for kind, label in _SELDOM.items() if kind in done}
    handles = [Patch(color=colour, label=label) for label, colour in {**keys, **_LANES}.items()]
    ncols = len(handles) if len(handles) <= most else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, columnspacing=1)


def draw_ranks(axes: Axes, timeline: "Timeline", unit: float) -> None:
    """A row a rank: what it computes, updates, sends and receives; time is in ``unit`` seconds."""
    bars: defaultdict[tuple[int, str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in timeline.spans:
        colour = _LANES.get(span.lane) or _OPS[span.computed]
        bars[span.rank, span.lane, colour].append(
            (span.start / unit, (span.end - span.start) / unit)
        )
    place = {
        "compute": (-0.42, 0.5),
        "update": (0.09, 0.07),
        "send": (0.17, 0.12),
        "receive": (0.3, 0.12),
    }
    for (rank, lane, colour), spans in bars.items():
        low, height = place[lane]
        wide = median(width for _, width in spans) > _THIN * axes.get_xlim()[1]
        apart = lane == "compute" and wide
        edge = "white" if apart else colour  # a line of its own colour keeps thin bars visible
        axes.broken_barh(
            spans,
            (rank + low, height),
            facecolors=colour,
            edgecolor=edge,
            linewidth=0.3 if apart else 0.1,
        )
    axes.tick_params(length=0, labelbottom=False)


def _draw_memory(
    axes: Axes, timeline: "Timeline", rank: int, unit: float, memory_unit: float
) -> None:
    curves = [timeline.memory(rank, kind) for kind in _KINDS]
    times = np.unique([when for curve in curves for when, _ in curve] + [timeline.end])
    below = np.zeros(len(times))
    for (kind, colour), curve in zip(_KINDS.items(), curves, strict=True):
        if not any(held for _, held in curve):
            continue
        when = np.array([t for t, _ in curve])
        held = np.array([h for _, h in curve]) / memory_unit
        at = np.searchsorted(when, times, side="right") - 1
        top = below + np.where(at >= 0, held[at], 0.0)
        axes.fill_between(
            times / unit, below, top, step="post", color=colour, alpha=0.6, linewidth=0, label=kind
        )
        below = top
    axes.legend(loc="upper center", ncols=3, fontsize=6, columnspacing=0.8, handlelength=0.8)


def draw_traffic(axes: Axes, rate: NDArray[np.float64], end: float) -> None:
    """What is sent over time, of :func:`rate_of_sending`, until ``end`` on the axis of time."""
    axes.stairs(rate, np.linspace(0, end, _BINS + 1), fill=True, color=PURPLE, alpha=0.8)


def rate_of_sending(timeline: "Timeline") -> NDArray[np.float64]:
    """Bytes a second that all ranks send, in each of as many equal parts of the time."""
    return bytes_sent_by_bin(timeline) * _BINS / timeline.end


def bytes_sent_by_bin(timeline: "Timeline") -> NDArray[np.float64]:
    """Bytes that all ranks send in each bin of the time."""
    edges = np.linspace(0, timeline.end, _BINS + 1)
    sent = np.zeros(_BINS)
    width = edges[1] - edges[0]
    for span in timeline.spans:
        if span.lane != "send" or not span.bytes:
            continue
        first, last = (min(_BINS - 1, int(t / width)) for t in (span.start, span.end))
        if first == last:
            sent[first] += span.bytes
            continue
        bins = np.arange(first, last + 1)
        overlap = np.minimum(edges[bins + 1], span.end) - np.maximum(edges[bins], span.start)
        sent[bins] += span.bytes * overlap / overlap.sum()
    return sent


def activity(timeline: "Timeline") -> Figure:
    """The rows of a timeline's ranks, and below them what all of them send."""
    with style():
        n_ranks = timeline.n_ranks
        height = min(7.0, 2.2 + 0.25 * n_ranks)
        figure = drawing((4.5, height))
        ratios = (max(2.0, 0.45 * n_ranks), 1)
        ranks, traffic = figure.subplots(2, 1, height_ratios=ratios, sharex="col")
        unit, name = unit_for(timeline.end, TIMES)
        rate = rate_of_sending(timeline)
        fastest = rate.max()
        traffic_unit, traffic_name = unit_for(fastest, RATES)
        traffic.set_xlim(0, timeline.end / unit)
        draw_ranks(ranks, timeline, unit)
        align([ranks], [("rank", n_ranks)])
        draw_traffic(traffic, rate / traffic_unit, timeline.end / unit)
        traffic.set_ylim(0, 1.1 * fastest / traffic_unit or None)
        ranks.set_title(timeline.name)
        traffic.set_ylabel(f"sent\n({traffic_name})")
        traffic.set_xlabel(f"time ({name})")
        add_keys(figure, [timeline], most=5)
        return figure

"""What ranks did when, and what they sent: a timeline whose memory is not known."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from toolkit.figures.rows import align
from toolkit.figures.style import GREEN, ORANGE, PURPLE, SKY, VERMILION, style
from toolkit.figures.timeline import (
    RATES,
    TIMES,
    bytes_sent_by_bin,
    draw_ranks,
    draw_traffic,
    unit_for,
)

if TYPE_CHECKING:
    from toolkit.cost import Timeline

_KEYS = {
    "forward": SKY,
    "backward": ORANGE,
    "update": GREEN,
    "send": PURPLE,
    "receive": VERMILION,
}


def activity(timeline: "Timeline") -> Figure:
    """The rows of a timeline's ranks, and below them what all of them send."""
    with style():
        n_ranks = timeline.n_ranks
        height = min(7.0, 2.2 + 0.25 * n_ranks)
        figure = Figure(figsize=(4.5, height), layout="constrained")
        ratios = (max(2.0, 0.45 * n_ranks), 1)
        ranks, traffic = figure.subplots(2, 1, height_ratios=ratios, sharex="col")
        unit, name = unit_for(timeline.end, TIMES)
        sent = bytes_sent_by_bin(timeline)
        fastest = sent.max() * len(sent) / timeline.end
        traffic_unit, traffic_name = unit_for(fastest, RATES)
        draw_ranks(ranks, timeline, unit)
        align([ranks], [("rank", n_ranks)])
        draw_traffic(traffic, timeline, unit, traffic_unit)
        traffic.set_ylim(0, 1.1 * fastest / traffic_unit or None)
        ranks.set_title(timeline.name)
        traffic.set_ylabel(f"sent\n({traffic_name})")
        traffic.set_xlabel(f"time ({name})")
        handles = [Patch(color=colour, label=label) for label, colour in _KEYS.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, columnspacing=1)
        return figure

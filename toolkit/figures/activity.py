"""What ranks did when, and what they sent: a timeline whose memory is not known."""

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from toolkit.figures.rows import align
from toolkit.figures.style import drawing, style
from toolkit.figures.timeline import add_keys, draw_ranks, draw_traffic, rate_of_sending
from toolkit.format import RATES, TIMES, unit_for

if TYPE_CHECKING:
    from toolkit.cost import Timeline


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

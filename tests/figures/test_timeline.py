"""The figure of timelines shows all ranks, memory and traffic of each, on one scale."""

from dataclasses import replace

import pytest

from toolkit.cost import UNIT, Timeline, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.figures import timelines
from toolkit.figures.timeline_figure import bytes_sent_by_bin
from toolkit.schedule import catalog


def timeline(schedule) -> Timeline:
    return simulate(schedule.lower(2), unit_costs(schedule.n_stages), UNIT)


DP = timeline(catalog.data_parallel(4))
ALONE = timeline(catalog.gradient_accumulation(4, 4))


def rows(figure, n):
    """(ranks, memory, traffic) of each of ``n`` columns."""
    axes = figure.axes
    return list(zip(axes[:n], axes[n : 2 * n], axes[2 * n :], strict=True))


@pytest.mark.parametrize(
    "shown", [[DP, ALONE], [ALONE, DP]], ids=["DP first", "DP last"]
)
def test_nothing_is_cut_off(shown):
    found = rows(timelines(shown), 2)
    for timeline, (ranks, memory, traffic) in zip(shown, found, strict=True):
        bottom, top = ranks.get_ylim()
        extents = [bar.get_datalim(ranks.transData) for bar in ranks.collections]
        assert top <= min(box.y0 for box in extents)
        assert timeline.n_ranks - 1 < max(box.y1 for box in extents) <= bottom
        assert ranks.get_yticks().tolist() == list(range(timeline.n_ranks))
        for panel, drawn in ((memory, memory.collections), (traffic, traffic.patches)):
            assert drawn
            assert panel.dataLim.y1 < panel.get_ylim()[1]
    for panels in zip(*found, strict=True):
        assert len({axes.get_ylim() for axes in panels}) == 1
    longest = max(timeline.end for timeline in shown)
    assert {axes.get_xlim() for column in found for axes in column} == {(0, longest)}


def test_every_colour_is_named():
    whole = ["forward", "backward", "update", "send", "receive"]
    split = [*whole[:2], "backward of weights", *whole[2:]]
    predicted = [*whole[:2], "prediction", *whole[2:]]
    slow = replace(UNIT, memory_bandwidth=9.0)
    late = simulate(
        catalog.cyclic(2, 1, correction="extrapolate").lower(4), unit_costs(2), slow
    )
    zero_bubble = timeline(catalog.zero_bubble(2, 2))
    for shown, names in ((DP, whole), (zero_bubble, split), (late, predicted)):
        (legend,) = timelines(shown).legends
        assert [text.get_text() for text in legend.get_texts()] == names


def test_thin_bars_have_no_line_around_them():
    for n_steps, line in ((2, True), (8, False)):
        found = simulate(catalog.gpipe(8, 8).lower(n_steps), unit_costs(8), UNIT)
        bars = timelines(found).axes[0].collections[0]
        assert (bars.get_edgecolor()[0, :3].tolist() == [1, 1, 1]) is line


def test_no_timeline_is_refused():
    with pytest.raises(UserError, match="no timeline"):
        timelines([])


def test_one_timeline_needs_no_list():
    """Traffic is what all ranks send; an empty panel if they send nothing."""
    ((ranks, _, traffic),) = rows(timelines(DP), 1)
    assert ranks.get_title() == "DP"
    (sent,) = traffic.patches
    assert sent.get_data().values.max() > 0
    assert bytes_sent_by_bin(DP).sum() == pytest.approx(sum(DP.bytes_sent()))
    ((_, _, traffic),) = rows(timelines(ALONE), 1)
    assert traffic.get_ylim()[0] == 0
    assert not bytes_sent_by_bin(ALONE).any()

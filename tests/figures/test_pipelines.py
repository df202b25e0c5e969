"""The figure of pipelines shows a point for each method, and the legend names it."""

from toolkit.figures import pipelines
from toolkit.figures.style import SERIES

HELD = {
    "GPipe": 2.0,
    "1F1B": 1.0,
    "ZB-H1": 1.0,
    "ZB-V": 1.0,
    "V-Half": 0.625,
    "V-Min": 0.5,
}
IDLE = {
    "GPipe": 0.3,
    "1F1B": 0.3,
    "ZB-H1": 0.13,
    "ZB-V": 0.0,
    "V-Half": 0.17,
    "V-Min": 0.22,
}
LATE = ("PipeDream-2BW", "CDP-v1", "CDP-v2")


def rows(m, by=1.0):
    points = [(name, HELD[name], by * IDLE[name], True) for name in HELD]
    points += [(name, 1.0, 0.0, False) for name in LATE]
    keys = ("method", "activations", "idle", "flush")
    return [
        dict(zip(keys, p, strict=True)) | {"microbatches": m, "ranks": 8}
        for p in points
    ]


def look(line):
    return (
        line.get_color(),
        line.get_marker(),
        line.get_markersize(),
        line.get_markerfacecolor(),
    )


def test_a_panel_a_number_and_a_point_a_method():
    figure = pipelines(rows(16) + rows(1, by=0.5))
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    looks = {
        look(line): name
        for line, name in zip(legend.legend_handles, names, strict=True)
    }  # all differ
    assert [*looks.values()] == [*HELD, *LATE]
    titles = ["8 ranks, 16 micro-batches", "8 ranks, 1 micro-batch"]
    assert [axes.get_title() for axes in figure.axes] == titles
    for axes, by in zip(figure.axes, (1, 0.5), strict=True):
        points = {
            looks[look(line)]: (line.get_xdata()[0], line.get_ydata()[0])
            for line in axes.get_lines()
        }
        fresh = {name: (HELD[name], by * IDLE[name]) for name in HELD}
        assert points == fresh | dict.fromkeys(LATE, (1.0, 0.0))


def test_points_at_one_place_show():
    """Rings for late weights, each larger than the last, around a filled marker."""
    lines = {
        line.get_label(): line for line in pipelines(rows(16)).legends[0].legend_handles
    }
    rings = [lines[name] for name in LATE]
    sizes = [line.get_markersize() for line in (lines["ZB-V"], *rings)]
    assert sizes == sorted({*sizes})
    assert {line.get_markerfacecolor() for line in rings} == {"none"}
    assert {lines[name].get_markerfacecolor() for name in HELD} <= {*SERIES}


def test_many_numbers_go_into_rows_and_keep_their_scales():
    figure = pipelines([row for m in range(2, 6) for row in rows(m)])
    figure.draw_without_rendering()
    drawn = [axes for axes in figure.axes if axes.axison]
    assert len(drawn) == 4
    assert len({axes.get_position().y0 for axes in drawn}) == 2
    labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in drawn]
    assert labelled == [False, True, True, True]

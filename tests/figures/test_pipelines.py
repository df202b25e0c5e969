"""The figure of pipelines has all of them, told apart and named without overlaps."""

import sys
from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from toolkit.figures import pipelines
from toolkit.figures.pipelines_figure import name_points
from toolkit.figures.style import BLUE, VERMILION

HELD = {"GPipe": 2.0, "1F1B": 1.0, "ZB-H1": 1.0, "ZB-V": 1.0, "V-Half": 0.625, "V-Min": 0.5}
IDLE = {"GPipe": 0.3, "1F1B": 0.3, "ZB-H1": 0.13, "ZB-V": 0.0, "V-Half": 0.17, "V-Min": 0.22}
LATE = ("PipeDream-2BW", "CDP-v1", "CDP-v2")


def rows(m, by=1.0):
    points = [(name, HELD[name], by * IDLE[name], True) for name in HELD]
    points += [(name, 1.0, 0.0, False) for name in LATE]
    keys = ("method", "activations", "idle", "flush")
    return [dict(zip(keys, p, strict=True)) | {"microbatches": m, "ranks": 8} for p in points]


def named(axes):
    return [text for text in axes.texts if text.get_text()]


def points(axes):
    return {
        (line.get_xdata()[0], line.get_ydata()[0], line.get_color(), line.get_marker())
        for line in axes.get_lines()
    }


def test_a_panel_a_number_and_a_point_a_method():
    figure = pipelines(rows(16) + rows(1, by=0.5))
    panels = figure.axes
    titles = ["8 ranks, 16 micro-batches", "8 ranks, 1 micro-batch"]
    assert [axes.get_title() for axes in panels] == titles
    for axes, by in zip(panels, (1, 0.5), strict=True):
        fresh = {(HELD[name], by * IDLE[name], BLUE, "o") for name in HELD}
        assert points(axes) == fresh | {(1.0, 0.0, VERMILION, "s")}
        assert {text.get_text() for text in named(axes)} == {*HELD, "\n".join(LATE)}


def test_names_cover_neither_names_nor_points():
    figure = pipelines(rows(16) + rows(32, 0.5) + rows(64, 0.2))
    figure.draw_without_rendering()
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in named(axes)]
        for one, other in combinations(boxes, 2):
            assert Bbox.intersection(one, other) is None
        for x, y, _, _ in points(axes):
            at = axes.transData.transform((x, y))
            assert not any(box.contains(*at) for box in boxes)


def test_names_are_placed_once_panels_are(monkeypatch):
    seen = {}
    module = sys.modules["toolkit.figures.pipelines_figure"]
    monkeypatch.setattr(
        module, "name_points", lambda axes, _: seen.update({axes: axes.get_window_extent().bounds})
    )
    figure = pipelines(rows(16) + rows(32))
    figure.draw_without_rendering()
    assert seen == {axes: axes.get_window_extent().bounds for axes in figure.axes}


def test_many_numbers_go_into_rows_and_keep_their_scales():
    figure = pipelines([row for m in range(2, 6) for row in rows(m)])
    drawn = [axes for axes in figure.axes if axes.axison]
    assert len(drawn) == 4
    assert len({axes.get_position().y0 for axes in drawn}) == 2
    labelled = [axes.xaxis.get_tick_params()["labelbottom"] for axes in drawn]
    assert labelled == [False, True, True, True]


def placed(points):
    """Axes from 0 to 1, and where each name is, in the order of the axes."""
    figure = Figure(figsize=(3, 2), dpi=288)  # four pixels a point
    axes = figure.subplots()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    name_points(axes, [(x, y, name, "black") for name, (x, y) in points.items()])
    return axes, {t.get_text(): t.get_window_extent() for t in axes.texts if t.get_text()}


def middle(axes, point):
    return axes.transData.transform(point)


@pytest.mark.parametrize(("at", "right"), [(0.5, True), (0.97, False)])
def test_a_name_is_to_the_right_where_there_is_room_and_else_to_the_left(at, right):
    axes, boxes = placed({"alone": (at, 0.5)})
    x, y = middle(axes, (at, 0.5))
    box = boxes["alone"]
    assert 0 < (box.x0 - x if right else x - box.x1) < 30
    assert box.y0 < y < box.y1
    assert len(axes.texts) == 1  # no line


@pytest.mark.parametrize("corner", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_name_stays_within_the_frame(corner):
    axes, boxes = placed({"two\nlines": corner})
    frame, box = axes.get_window_extent(), boxes["two\nlines"]
    assert frame.x0 <= box.x0
    assert box.x1 <= frame.x1
    assert frame.y0 <= box.y0
    assert box.y1 <= frame.y1


def test_a_crowd_is_named_without_overlaps_and_with_lines():
    crowd = {f"method {k}": (0.5 + 0.02 * (k % 3), 0.5 + 0.02 * (k // 3)) for k in range(9)}
    axes, boxes = placed(crowd)
    assert boxes.keys() == crowd.keys()
    for one, other in combinations(boxes.values(), 2):
        assert Bbox.intersection(one, other) is None
    for point in crowd.values():
        assert not any(box.contains(*middle(axes, point)) for box in boxes.values())
    assert len(axes.texts) > len(crowd)  # lines lead from those that are far


def test_a_name_covers_no_part_of_a_point():
    """Whose middle it would miss."""
    axes, boxes = placed({"a wide name": (0.5, 0.5), "b": (0.57, 0.555)})
    x, y = middle(axes, (0.57, 0.555))
    edge = 4 * 3.5
    marker = Bbox.from_extents(x - edge, y - edge, x + edge, y + edge)
    assert Bbox.intersection(boxes["a wide name"], marker) is None

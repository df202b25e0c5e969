"""Names find room beside their points."""

from itertools import combinations

import pytest
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from toolkit.figures.pipelines_figure import name_points


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


def test_a_name_is_to_the_right_where_there_is_room():
    axes, boxes = placed({"alone": (0.5, 0.5)})
    x, y = middle(axes, (0.5, 0.5))
    assert 0 < boxes["alone"].x0 - x < 30
    assert boxes["alone"].y0 < y < boxes["alone"].y1
    assert len(axes.texts) == 1  # no line


def test_at_the_right_edge_it_is_to_the_left():
    axes, boxes = placed({"alone": (0.97, 0.5)})
    x, y = middle(axes, (0.97, 0.5))
    assert 0 < x - boxes["alone"].x1 < 30
    assert boxes["alone"].y0 < y < boxes["alone"].y1


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

"""Panels side by side: rows of one height, each panel's own by name."""

from matplotlib.figure import Figure

from toolkit.figures.style import align


def aligned(*rows):
    """The panels after ``align``, as (limits, numbers, name) each."""
    panels = Figure().subplots(1, len(rows), squeeze=False)[0]
    align(panels, rows)
    found = []
    for axes in panels:
        numbers = [label.get_text() for label in axes.get_yticklabels() if label.get_visible()]
        found.append((axes.get_ylim(), list(map(int, numbers)), axes.get_ylabel()))
    return found


def test_all_panels_have_room_for_the_most_rows():
    assert aligned(("rank", 4), ("rank", 1), ("rank", 3)) == [
        ((3.5, -0.5), [0, 1, 2, 3], "rank"),
        ((3.5, -0.5), [0], "rank"),
        ((3.5, -0.5), [0, 1, 2], "rank"),
    ]


def test_rows_as_those_to_the_left_are_named_once():
    found = aligned(("micro-batch", 2), ("rank", 2), ("rank", 2))
    assert [(numbers, name) for _, numbers, name in found] == [
        ([0, 1], "micro-batch"),
        ([0, 1], "rank"),
        ([], ""),
    ]


def test_no_more_numbers_than_have_room():
    (_, many, _), (_, few, _) = aligned(("rank", 64), ("rank", 36))
    assert many == list(range(0, 64, 4))
    assert few == list(range(0, 36, 4))

"""Curves over epochs show the numbers that they are given."""

from math import nan

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.figures import accuracy, loss
from toolkit.figures.style import MARKERS, SERIES

CURVES = {
    "DP": [[0.5, 0.8, 0.9], [0.7, 0.9, 0.9]],
    "CDP-v2": [[0.4, 0.6, 1.0], [0.4, 0.7, 0.8]],
}


@pytest.mark.parametrize(
    ("draw", "factor", "label"),
    [(accuracy, 100, "test accuracy (%)"), (loss, 1, "test loss (nats)")],
)
def test_lines_are_means_and_bands_are_ranges(draw, factor, label):
    (axes,) = draw(CURVES).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", label)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        *CURVES,
        "all seeds",
    ]
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_ylim()[1] <= 101
    bands = axes.collections[: len(CURVES)]
    for line, band, runs in zip(axes.lines, bands, CURVES.values(), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
        np.testing.assert_allclose(line.get_ydata(), factor * np.mean(runs, axis=0))
        corners = band.get_paths()[0].vertices
        for epoch, values in enumerate(zip(*runs, strict=True), 1):
            heights = corners[corners[:, 0] == epoch, 1]
            expected = [factor * min(values), factor * max(values)]
            np.testing.assert_allclose([heights.min(), heights.max()], expected)


def test_rules_differ_by_colour_marker_and_dashes():
    (axes,) = accuracy({f"rule {k}": [[0.1, 0.2]] for k in range(8)}).axes
    assert [line.get_color() for line in axes.lines] == [*SERIES, SERIES[0]]
    assert [line.get_marker() for line in axes.lines] == [*MARKERS, MARKERS[0]]
    assert [line.get_linestyle() for line in axes.lines] == ["-"] * 7 + ["--"]


def test_the_legend_of_many_rules_leaves_height_to_the_curves():
    rules = [f"CDP-v1 predicted (cdp_v1_form_{k})" for k in range(12)]
    figure = accuracy({rule: [[0.1, 0.2], [0.2, 0.3]] for rule in rules})
    figure.draw_without_rendering()
    assert figure.axes[0].get_position().height > 0.7


@pytest.mark.parametrize(
    ("curves", "got"),
    [
        ({}, "no runs of any rule"),
        ({"DP": [], "X": [[1]]}, "no runs of DP"),
        ({"DP": [[0.5, 0.8], [0.7]]}, r"DP .*got \[1, 2\]"),
    ],
)
def test_curves_that_cannot_be_drawn_are_refused(curves, got):
    with pytest.raises(UserError, match=got):
        accuracy(curves)


def test_runs_that_have_diverged_are_left_out_from_there_on():
    (axes,) = accuracy({"DP": [[0.2, nan], [0.4, 0.6]], "late": [[nan, nan]]}).axes
    mean, none = (line.get_ydata().tolist() for line in axes.lines)
    assert mean == pytest.approx([30, 60])
    assert none == pytest.approx([nan, nan], nan_ok=True)


def test_long_trainings_are_drawn_by_few_points_with_both_ends():
    figure = accuracy({"DP": [[k / 100_000 for k in range(100_001)]]})
    whole, last = (
        panel.lines[0].get_xdata()
        for panel in (figure.axes[0], *figure.axes[0].child_axes)
    )
    assert (whole[0], whole[-1], last[-1]) == (1, 100_001, 100_001)
    assert len(whole) == len(last) <= 1000


@pytest.mark.parametrize(("end", "n_panels"), [(0.85, 2), (0.4, 1)])
def test_last_epochs_are_magnified_where_they_lie_close(end, n_panels):
    rises = [[0.1 + (to - 0.1) * k / 11 for k in range(12)] for to in (0.9, end)]
    (axes,) = accuracy({"DP": rises[:1], "late": rises[1:]}).axes
    assert 1 + len(axes.child_axes) == n_panels

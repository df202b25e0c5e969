"""Curves over epochs show the numbers that they are given."""

from math import nan

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.figures import accuracy, loss
from toolkit.figures.style import MARKERS, SERIES

CURVES = {"DP": [[0.5, 0.8, 0.9], [0.7, 0.9, 0.9]], "CDP-v2": [[0.4, 0.6, 1.0], [0.4, 0.7, 0.8]]}


def test_lines_are_means_and_bands_are_ranges():
    (axes,) = accuracy(CURVES).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines) == list(CURVES)
    for line, band, runs in zip(lines.values(), axes.collections, CURVES.values(), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3])
        np.testing.assert_allclose(line.get_ydata(), 100 * np.mean(runs, axis=0))
        corners = band.get_paths()[0].vertices
        for epoch, values in enumerate(zip(*runs, strict=True), 1):
            heights = corners[corners[:, 0] == epoch, 1]
            np.testing.assert_allclose(
                [heights.min(), heights.max()], [100 * min(values), 100 * max(values)]
            )


def test_rules_differ_by_colour_and_by_marker():
    (axes,) = accuracy({f"rule {k}": [[0.1, 0.2]] for k in range(7)}).axes
    assert [line.get_color() for line in axes.get_lines()] == list(SERIES)
    assert [line.get_marker() for line in axes.get_lines()] == list(MARKERS)


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


def test_losses_are_as_they_are():
    (axes,) = loss(CURVES).axes
    for line, runs in zip(axes.get_lines(), CURVES.values(), strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.mean(runs, axis=0))
    assert axes.get_ylabel() == "test loss (nats)"


def test_axes_say_what_they_show():
    (axes,) = accuracy(CURVES).axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "test accuracy (%)")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(CURVES)
    assert all(tick == int(tick) for tick in axes.get_xticks())
    assert axes.get_ylim()[1] <= 101


def test_runs_that_have_diverged_are_left_out_from_there_on():
    lost, whole = [0.2, nan], [0.4, 0.6]
    (axes,) = accuracy({"DP": [lost, whole], "late": [[nan, nan]]}).axes
    mean, none = (line.get_ydata().tolist() for line in axes.lines)
    assert mean == pytest.approx([30, 60])
    assert none == pytest.approx([nan, nan], nan_ok=True)

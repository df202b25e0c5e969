"""The figure of limited links shows the rows and the traffic that it is given."""

import numpy as np
import pytest

from toolkit.figures import link_times

TIMES = {"compute": 0.5, "CDP-v1": 0.6, "DDP": 1.0, "DDP 16-bit": 0.8}


def row(link, method, value, spread=0.05, relative=True):
    low, high = value - spread, value + spread
    ratio = {"/ DDP": value, "least": low, "most": high}
    return {"link": link, "M/C": 1.0, "method": method} | (
        ratio | {"step (s)": 2 * value, "min": 2 * low, "max": 2 * high}
        if relative
        else dict.fromkeys(ratio) | {"step (s)": value, "min": low, "max": high}
    )


def rows(**changes):
    return [
        row(link, name, value, **changes)
        for link in ("M = C", "unshaped")
        for name, value in TIMES.items()
    ]


def dots(axes):
    labels = [label.get_text() for label in axes.figure.axes[0].get_yticklabels()]
    found = [line for line in axes.get_lines() if line.get_marker() == "o"]
    return {labels[int(line.get_ydata()[0])]: line.get_xdata()[0] for line in found}


def test_a_dot_a_method_and_a_panel_a_link():
    figure = link_times(rows(), {}, 0.01)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert dots(axes) == TIMES
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == ["M = C", "unshaped"]


def test_ddp_stands_above_and_what_nobody_can_beat_below():
    axes, _ = link_times(rows(), {}, 0.01).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["DDP", "DDP 16-bit", "CDP-v1", "compute"]
    bottom, top = axes.get_ylim()
    assert top < 0 < bottom


def test_lines_are_ranges():
    axes, _ = link_times(rows(spread=0.2), {}, 0.01).axes
    ends = {tuple(line.get_xdata()) for line in axes.get_lines() if line.get_linewidth() == 2.5}
    assert ends == {(value - 0.2, value + 0.2) for value in TIMES.values()}


def test_without_ddp_it_is_seconds():
    figure = link_times(rows(relative=False), {}, 0.01)
    assert dots(figure.axes[0]) == TIMES
    assert figure.get_supxlabel() == "step time (s)"


@pytest.mark.parametrize(("scale", "unit", "by"), [(1, "Mbit/s", 1), (100, "Gbit/s", 1000)])
def test_traffic_has_a_panel_a_method_with_its_mean(scale, unit, by):
    curves = {"DDP": scale * np.array([0.0, 60.0, 0.0]), "CDP-v1": scale * np.array([20.0] * 3)}
    figure = link_times(rows(), {"M = C": curves}, 0.01)
    ddp, cdp = figure.axes[2:]
    assert ddp.get_title().endswith(f"({unit})")
    for axes, (name, curve) in zip((ddp, cdp), curves.items(), strict=True):
        (drawn,) = axes.patches
        np.testing.assert_allclose(drawn.get_data().values, curve / by)
        np.testing.assert_allclose(drawn.get_data().edges, [0, 0.01, 0.02, 0.03])
        assert axes.get_lines()[0].get_ydata()[0] == pytest.approx(curve.mean() / by)
        texts = {text.get_text() for text in axes.texts}
        assert texts == {name, f"peak/mean {curve.max() / curve.mean():.1f}"}


def test_a_silent_method_has_no_peak():
    figure = link_times(rows(), {"unshaped": {"DDP": np.zeros(3)}}, 0.01)
    assert "silent" in {text.get_text() for text in figure.axes[2].texts}

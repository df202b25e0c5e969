"""The figure of limited links shows the rows and the traffic that it is given."""

import numpy as np
import pytest

from toolkit.figures import link_times

TIMES = {"compute": 0.5, "CDP-v1": 0.6, "DDP": 1.0, "DDP 16-bit": 0.8}


def rows(relative=True):
    names = ("/ DDP", "least", "most") if relative else ("step (s)", "min", "max")
    blank = {"M/C": 1.0, **dict.fromkeys(("/ DDP", "least", "most"))}
    return [
        {**blank, "link": link, "method": method}
        | dict(zip(names, (value, value - 0.2, value + 0.2), strict=True))
        for link in ("M = C", "unshaped")
        for method, value in TIMES.items()
    ]


@pytest.mark.parametrize(
    ("relative", "label"),
    [(True, "step time divided by that of DDP"), (False, "step time (s)")],
)
def test_a_dot_a_method_and_a_panel_a_link(relative, label):
    """DDP stands above, and below what no method can beat; lines are ranges."""
    figure = link_times(rows(relative), {}, 0.01)
    assert figure.get_supxlabel() == label
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == [
        "M = C",
        "unshaped",
    ]
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert names == ["DDP", "DDP 16-bit", "CDP-v1", "compute"]
    bottom, top = figure.axes[0].get_ylim()
    assert top < 0 < bottom
    for axes in figure.axes:
        lines = axes.get_lines()
        dots = [line for line in lines if line.get_marker() == "o"]
        assert {names[int(d.get_ydata()[0])]: d.get_xdata()[0] for d in dots} == TIMES
        ranges = {
            tuple(line.get_xdata()) for line in lines if line.get_linewidth() == 2.5
        }
        assert ranges == {(value - 0.2, value + 0.2) for value in TIMES.values()}


@pytest.mark.parametrize(
    ("scale", "unit", "by"), [(1, "Mbit/s", 1), (100, "Gbit/s", 1000)]
)
def test_traffic_has_a_panel_a_method_with_its_mean(scale, unit, by):
    curves = {
        "DDP": scale * np.array([0.0, 60.0, 0.0]),
        "CDP-v1": scale * np.array([20.0] * 3),
    }
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

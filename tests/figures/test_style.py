"""Files of figures."""

import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from toolkit.cost import UNIT, memory_curve, simulate, unit_costs
from toolkit.figures import accuracy, activity, memory_curves, save, schedules, timelines
from toolkit.model import build
from toolkit.schedule import catalog


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("resnet50_lr0.1", "resnet50_lr0.1"),
        ("v1.2.png", "v1.2"),
        ("memory.svg", "memory"),
        ("memory", "memory"),
        ("table.csv", "table.csv"),
    ],
)
@pytest.mark.parametrize("form", [str, lambda path: path], ids=["str", "Path"])
def test_a_name_keeps_all_but_the_ending_of_a_figure(tmp_path, given, name, form):
    paths = save(Figure((1, 1)), form(tmp_path / given))
    assert [path.name for path in paths] == [f"{name}.png", f"{name}.svg"]
    assert sorted(tmp_path.iterdir()) == paths


def drawn():
    import torch

    schedule = catalog.cyclic(2)
    timeline = simulate(schedule.lower(3), unit_costs(2), UNIT)
    curve = memory_curve(build("resnet8"), torch.empty(2, 3, 32, 32, device="meta"), "flops")
    yield schedules(schedule)
    yield timelines(timeline)
    yield activity(timeline)
    yield memory_curves(curve, [2], "ResNet-8")
    yield accuracy({"DP": [[0.5, 0.6]]})


def test_notebooks_show_figures_unasked():
    """Without %matplotlib inline, which a Figure of matplotlib waits for."""
    for figure in drawn():
        shown, _ = DisplayFormatter().format(figure)
        assert shown["image/png"].startswith(b"\x89PNG")
    assert "image/png" not in DisplayFormatter().format(Figure((1, 1)))[0]

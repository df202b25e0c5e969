"""The look of figures, their files, and panels side by side."""

from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure

from toolkit.cost import UNIT, memory_curve, simulate, unit_costs
from toolkit.figures import accuracy, memory_curves, save, schedules, style, timelines
from toolkit.figures.style import SERIES, align
from toolkit.model import build
from toolkit.schedule import catalog


@pytest.mark.parametrize("form", [str, Path])
def test_a_name_keeps_all_but_the_ending_of_a_figure(tmp_path, form):
    names = {
        "resnet50_lr0.1": "resnet50_lr0.1",
        "v1.2.png": "v1.2",
        "memory.svg": "memory",
    }
    for given, name in names.items():
        paths = save(Figure((1, 1)), form(tmp_path / given))
        assert paths == [tmp_path / f"{name}.png", tmp_path / f"{name}.svg"]
        assert all(path.is_file() for path in paths)


def test_saves_both_formats_alike_each_time(tmp_path):
    shown = {"DP": [[0.5, 0.8], [0.7, 0.9]]}
    paths = [save(accuracy(shown), tmp_path / name) for name in ("one", "two")]
    for one, two in zip(*paths, strict=True):
        assert one.stat().st_size > 5_000
        assert one.read_bytes() == two.read_bytes()


def test_the_style_ends_with_its_block():
    before = mpl.rcParams["font.size"]
    with style():
        assert mpl.rcParams["font.size"] == 8
        assert mpl.rcParams["axes.prop_cycle"].by_key()["color"] == list(SERIES)
    assert mpl.rcParams["font.size"] == before


def test_notebooks_show_figures_unasked():
    """Without %matplotlib inline, which a Figure of matplotlib waits for."""
    schedule = catalog.cyclic(2)
    curve = memory_curve(
        build("resnet8"), torch.empty(2, 3, 32, 32, device="meta"), "flops"
    )
    for figure in (
        schedules(schedule),
        timelines(simulate(schedule.lower(3), unit_costs(2), UNIT)),
        memory_curves(curve, [2], "ResNet-8"),
        accuracy({"DP": [[0.5, 0.6]]}),
    ):
        shown, _ = DisplayFormatter().format(figure)
        assert shown["image/png"].startswith(b"\x89PNG")
    assert "image/png" not in DisplayFormatter().format(Figure((1, 1)))[0]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [("rank", 4), ("rank", 1), ("rank", 3)],
            [([0, 1, 2, 3], "rank"), ([0], "rank"), ([0, 1, 2], "rank")],
        ),
        # Rows as those to the left are labelled once
        (
            [("micro-batch", 2), ("rank", 2), ("rank", 2)],
            [([0, 1], "micro-batch"), ([0, 1], "rank"), ([], "")],
        ),
        # No more numbers than have room
        ([("rank", 64), ("rank", 36)], [([*range(0, n, 4)], "rank") for n in (64, 36)]),
    ],
)
def test_panels_have_room_for_the_most_rows(rows, expected):
    panels = Figure().subplots(1, len(rows), squeeze=False)[0]
    align(panels, rows)
    for axes, (numbers, name) in zip(panels, expected, strict=True):
        shown = [
            label.get_text() for label in axes.get_yticklabels() if label.get_visible()
        ]
        assert ([*map(int, shown)], axes.get_ylabel()) == (numbers, name)
        assert axes.get_ylim() == (max(n for _, n in rows) - 0.5, -0.5)

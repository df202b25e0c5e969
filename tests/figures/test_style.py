"""Files of figures."""

import pytest
from matplotlib.figure import Figure

from toolkit.figures import save


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

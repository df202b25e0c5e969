"""The figure of a plan: each row of its table has its number at its dot, and no label hides one."""

import pytest

from toolkit.figures import plan_figure
from toolkit.format import GIB, MIB


def row(seconds, memory, staleness=0.0):
    return {"seconds": seconds, "memory": memory, "staleness": staleness, "ranks": 4}


def drawn(rows, limit=float("inf")):
    axes, _ = plan_figure(rows, [], rows[-1], limit).axes
    return axes, [text.get_text() for text in axes.texts]


def test_dots_that_nearly_coincide_share_a_label():
    rows = [row(1.0, GIB), row(1.001, GIB), row(2.0, 2 * GIB), row(1.0, 1.001 * GIB)]
    _, labels = drawn(rows)
    assert labels == ["0-1, 3", "2"]


def test_every_row_has_a_number():
    rows = [row(1 + index / 5, 4**index * MIB) for index in range(15)]
    _, labels = drawn(rows)
    assert labels == [str(index) for index in range(15)]


@pytest.mark.parametrize(("memory", "unit"), [(4 * GIB, "GiB"), (4 * MIB, "MiB")])
def test_memory_has_a_unit_that_fits(memory, unit):
    axes, _ = drawn([row(1.0, memory), row(2.0, memory / 2)])
    assert axes.get_ylabel().endswith(f"({unit})")
    low, high = axes.get_ylim()
    assert low < 2 < 4 < high

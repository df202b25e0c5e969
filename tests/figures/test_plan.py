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


def test_a_dot_between_two_others_shares_their_label():
    rows = [
        row(1.0, 11.9 * MIB),
        row(1.0, 10.8 * MIB),
        row(5.0, 90 * MIB),
        row(1.03, 11.2 * MIB),
    ]
    _, labels = drawn(rows)
    assert sorted(labels) == ["0-1, 3", "2"]


def test_rows_that_are_far_slower_are_drawn_too():
    axes, labels = drawn([row(1.0, GIB), row(4.0, 0.5 * GIB), row(30.0, 0.1 * GIB)])
    assert (sorted(labels), axes.get_xscale()) == (["0", "1", "2"], "log")
    low, high = axes.get_xlim()
    assert low < 1e3 < 30e3 < high
    assert drawn([row(1.0, GIB), row(4.0, 0.5 * GIB)])[0].get_xscale() == "linear"


@pytest.mark.parametrize(("memory", "unit"), [(4 * GIB, "GiB"), (4 * MIB, "MiB")])
def test_memory_has_a_unit_that_fits(memory, unit):
    axes, _ = drawn([row(1.0, memory), row(2.0, memory / 2)])
    assert axes.get_ylabel().endswith(f"({unit})")
    low, high = axes.get_ylim()
    assert low < 2 < 4 < high

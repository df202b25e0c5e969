"""Ports: no two messages at once, each as early as it can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.cost import hardware as ports
from toolkit.cost.hardware import Port, reserve


def taken(*stretches):
    port = Port()
    for start, end in stretches:
        port.take(start, end)
    return port


@pytest.mark.parametrize(
    ("ready", "seconds", "start"),
    [
        (0, 1, 0),
        (0, 2, 0),  # just before the first
        (0, 3, 8),
        (3, 1, 4),
        (4, 2, 4),  # just between
        (4, 3, 8),
        (5, 2, 8),
        (7, 0, 8),
        (9, 5, 9),
    ],
)
def test_the_first_gap_that_is_long_enough(ready, seconds, start):
    assert taken((6, 8), (2, 4)).free_from(ready, seconds) == start


def test_two_ports_meet_where_both_are_free():
    one, other = taken((0, 2), (5, 6)), taken((2, 3), (6, 9))
    assert reserve([one, other], 0, 2) == 3
    assert reserve([one, other], 0, 3) == 9
    assert reserve([one, other], 9.5, 1) == 12  # the stretch from 9 to 12 is taken
    assert one.free_from(10, 1) == other.free_from(10, 1) == 13
    assert reserve([one, other], 1, 0) == 1  # 0 seconds need no port


def test_what_is_long_ago_counts_as_busy(monkeypatch):
    monkeypatch.setattr(ports, "_KEPT", 2)
    port = taken(*((10 * k, 10 * k + 1) for k in range(5)))
    assert port.free_from(0, 1) == 11  # between the two oldest of those remembered
    assert port.free_from(12, 10) == 41


moments = st.integers(0, 30)


@given(st.lists(st.tuples(moments, st.integers(1, 5)), max_size=30))
def test_never_two_at_once_and_never_later_than_need_be(messages):
    port, busy = Port(), set()
    for ready, seconds in messages:
        start = port.free_from(ready, seconds)
        wanted = (t for t in range(ready, 400) if busy.isdisjoint(range(t, t + seconds)))
        assert start == next(wanted)
        port.take(start, start + seconds)
        busy |= set(range(start, start + seconds))

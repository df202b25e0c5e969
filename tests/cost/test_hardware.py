"""Machines: their few formulas by hand, and the numbers that they refuse."""

from math import inf, nan

import pytest

from toolkit.cost import UNIT, Hardware
from toolkit.model.analysis import Work

MACHINE = Hardware(
    "hand", flops=100.0, memory_bandwidth=10.0, link_bandwidth=4.0, link_latency=0.5, memory=64.0
)


@pytest.mark.parametrize(
    ("flops", "n_bytes", "seconds"),
    [(200, 1, 2.0), (1, 30, 3.0), (100, 10, 1.0), (0, 0, 0.0)],
    ids=["bound by arithmetic", "bound by memory", "ridge", "nothing"],
)
def test_roofline(flops, n_bytes, seconds):
    assert MACHINE.roofline(Work(flops, n_bytes)) == seconds


@pytest.mark.parametrize(("n_bytes", "seconds"), [(0, 0.5), (8, 2.5)])
def test_message(n_bytes, seconds):
    assert MACHINE.message(n_bytes) == seconds


@pytest.mark.parametrize(
    ("n_ranks", "seconds"),
    [(1, 0.0), (2, 2 * (0.5 + 6 / 4)), (3, 4 * (0.5 + 4 / 4)), (4, 6 * (0.5 + 3 / 4))],
)
def test_ring_all_reduce(n_ranks, seconds):
    """2(n-1) rounds of 12/n bytes."""
    assert MACHINE.all_reduce(12, n_ranks) == seconds


@pytest.mark.parametrize(
    ("n_ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10)]
)
def test_tree(n_ranks, rounds):
    assert MACHINE.tree(12, n_ranks) == rounds * (0.5 + 12 / 4)


def test_unit_hardware_takes_a_second_for_a_unit_and_talks_at_once():
    assert UNIT.roofline(Work(3, 10**9)) == 3
    assert UNIT.message(10**9) == UNIT.all_reduce(10**9, 8) == UNIT.tree(10**9, 8) == 0


def test_ranks_are_alike_unless_told_otherwise():
    assert [MACHINE.speed(rank) for rank in range(3)] == [1, 1, 1]
    assert [MACHINE.memory_of(rank) for rank in range(3)] == [64, 64, 64]
    mixed = Hardware("mixed", 1.0, 1.0, 1.0, speeds=(1.0, 0.5), memories=[8.0, inf])
    assert [mixed.speed(rank) for rank in range(2)] == [1, 0.5]
    assert [mixed.memory_of(rank) for rank in range(2)] == [8, inf]


@pytest.mark.parametrize("value", [0, -1.0, -inf, nan])
@pytest.mark.parametrize("name", ["flops", "memory_bandwidth", "link_bandwidth", "memory"])
def test_what_is_not_above_0_is_refused(name, value):
    numbers = {"flops": 1.0, "memory_bandwidth": 1.0, "link_bandwidth": 1.0} | {name: value}
    with pytest.raises(ValueError, match=f"^{name} of a hardware is above 0: got {value}"):
        Hardware("bad", **numbers)


@pytest.mark.parametrize("value", [0, -1.0, nan])
@pytest.mark.parametrize("name", ["speeds", "memories"])
def test_the_rank_to_blame_is_named(name, value):
    with pytest.raises(ValueError, match=rf"{name}\[1\] of a hardware is above 0: got {value}"):
        Hardware("bad", 1.0, 1.0, 1.0, **{name: (1.0, value)})


@pytest.mark.parametrize("latency", [-1e-9, inf, nan])
def test_a_latency_is_finite(latency):
    with pytest.raises(ValueError, match=f"link_latency is 0 seconds or more: got {latency}"):
        Hardware("bad", 1.0, 1.0, 1.0, link_latency=latency)

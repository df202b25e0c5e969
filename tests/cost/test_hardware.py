"""Machines: their few formulas by hand, and the numbers that they refuse."""

from dataclasses import replace
from math import inf, nan

import pytest
from hydra.utils import instantiate

from tests.cli.test_presets import CONF
from toolkit.cli.help import choices
from toolkit.cost import UNIT, Hardware, simulate, unit_costs
from toolkit.cost.hardware import presets
from toolkit.model.analysis import Work
from toolkit.notebook import settings
from toolkit.schedule import catalog

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


def test_products_of_16_bits():
    """As fast as told; bytes are as many as they are."""
    fast = replace(MACHINE, flops_in_16_bits=400.0)
    assert fast.roofline(Work(200, 1, in_16_bits=True)) == 0.5
    assert fast.roofline(Work(200, 30, in_16_bits=True)) == 3.0
    assert fast.roofline(Work(200, 1)) == MACHINE.roofline(Work(200, 1, in_16_bits=True)) == 2.0


def test_presets_tell_how_fast_products_of_16_bits_are():
    for hardware in presets().values():
        assert hardware.flops_in_16_bits == 2 * hardware.flops


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
    with pytest.raises(ValueError, match=f"^{name} of a hardware is a number above 0: got {value}"):
        Hardware("bad", **numbers)


@pytest.mark.parametrize("value", [0, -1.0, nan])
@pytest.mark.parametrize("name", ["speeds", "memories"])
def test_the_rank_to_blame_is_named(name, value):
    told = rf"{name}\[1\] of a hardware is a number above 0: got {value}"
    with pytest.raises(ValueError, match=told):
        Hardware("bad", 1.0, 1.0, 1.0, **{name: (1.0, value)})


@pytest.mark.parametrize("latency", [-1e-9, inf, nan])
def test_a_latency_is_finite(latency):
    with pytest.raises(ValueError, match=f"link_latency is 0 seconds or more: got {latency}"):
        Hardware("bad", 1.0, 1.0, 1.0, link_latency=latency)


@pytest.mark.parametrize("name", choices([CONF], "hardware"))
def test_a_preset_is_that_of_the_command_line(name):
    composed = instantiate(settings("memory", f"hardware={name}").hardware, _convert_="all")
    preset = Hardware.preset(name)
    assert vars(preset) | {"speeds": [], "memories": []} == vars(composed)
    assert (preset.speed(3), preset.memory_of(3)) == (1, preset.memory)


@pytest.mark.parametrize(
    ("name", "hint"), [("a100", "did you mean a100_nvlink? "), ("nope", ""), ("", "")]
)
def test_an_unknown_preset_is_refused_with_those_there_are(name, hint):
    with pytest.raises(ValueError, match="unknown hardware") as refused:
        Hardware.preset(name)
    known = "a100_nvlink, ethernet_10, ethernet_100, h200_nvlink"
    assert str(refused.value) == f"unknown hardware {name!r}: {hint}choose one of {known}"


def test_without_the_repository_there_are_no_presets(monkeypatch, tmp_path):
    monkeypatch.setattr("toolkit.files.ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"lives in the repository, .* pip install -e \."):
        Hardware.preset("a100_nvlink")


def test_a_file_of_ones_own_is_no_concern_of_the_others(monkeypatch, tmp_path):
    """One that is whole counts, and one that builds on another is for the command line alone."""
    folder = tmp_path / "conf" / "hardware"
    folder.mkdir(parents=True)
    whole = "name: mine\nflops: 2.0\nmemory_bandwidth: 1.0\nlink_bandwidth: 1.0\n"
    (folder / "mine.yaml").write_text(whole)
    (folder / "other.yaml").write_text("defaults: [mine, _self_]\nflops: 3.0\n")
    monkeypatch.setattr("toolkit.files.ROOT", tmp_path)
    assert Hardware.preset("mine").flops == 2
    with pytest.raises(ValueError, match=r"other.yaml does not tell all of a machine by itself"):
        Hardware.preset("other")


@pytest.mark.parametrize("given", ["a100_nvlink", None])
def test_what_is_no_hardware_is_refused(given):
    program = catalog.cyclic(2).lower(1)
    with pytest.raises(ValueError, match=f"is a toolkit.cost.Hardware: got {given!r}; one of"):
        simulate(program, unit_costs(2), given)

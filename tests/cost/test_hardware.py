"""Machines: their few formulas by hand, and the numbers that they refuse."""

from dataclasses import replace
from math import inf, nan

import pytest
from hydra.utils import instantiate

from tests.cli.test_presets import CONF
from toolkit.cli.help import choices
from toolkit.cost import UNIT, Hardware, simulate, unit_costs
from toolkit.errors import UserError
from toolkit.model.kernel_work import Work
from toolkit.notebook import settings
from toolkit.schedule import Action, catalog

MACHINE = Hardware(
    "hand",
    flops=100.0,
    memory_bandwidth=10.0,
    link_bandwidth=4.0,
    link_latency=0.5,
    memory=64.0,
)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(200, 1), 2.0),
        (Work(1, 30), 3.0),
        (Work(0, 0), 0.0),
        (Work(200, 1, in_16_bits=True), 0.5),
        (Work(200, 30, in_16_bits=True), 3.0),
    ],
    ids=["arithmetic", "memory", "nothing", "16-bit arithmetic", "16-bit memory"],
)
def test_roofline(work, seconds):
    assert replace(MACHINE, flops_in_16_bits=400.0).roofline(work) == seconds
    assert UNIT.roofline(work) == work.flops
    if not work.in_16_bits:
        assert MACHINE.roofline(work) == seconds


@pytest.mark.parametrize(
    ("n_ranks", "tree"),
    [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4), (1024, 10)],
)
def test_messages_and_collectives(n_ranks, tree):
    """A ring is 2(n-1) rounds of 12/n bytes."""
    assert (MACHINE.message(0), MACHINE.message(8)) == (0.5, 2.5)
    ring = 2 * (n_ranks - 1) * (0.5 + 12 / n_ranks / 4)
    assert MACHINE.collective(Action.ALL_REDUCE, 12, range(n_ranks)) == ring
    for action in (Action.BROADCAST, Action.REDUCE):
        assert MACHINE.collective(action, 12, range(n_ranks)) == tree * (0.5 + 12 / 4)
        assert (
            UNIT.message(10**9) == UNIT.collective(action, 10**9, range(n_ranks)) == 0
        )


def test_machines_of_several_ranks():
    """Links of 4 bytes/s after 0.5 s between machines, of 8 bytes/s within them."""
    pairs = replace(MACHINE, ranks_per_machine=2, local_bandwidth=8.0)
    assert [pairs.machine(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert (pairs.message(8, local=True), pairs.message(8)) == (1.0, 2.5)
    within, between = 2 * (6 / 8), 2 * (0.5 + 6 / 4)  # two rounds of a half each
    assert pairs.collective(Action.ALL_REDUCE, 12, range(2)) == within
    assert pairs.collective(Action.ALL_REDUCE, 12, (0, 2)) == between
    assert pairs.collective(Action.ALL_REDUCE, 12, range(4)) == within + between
    assert pairs.collective(Action.REDUCE, 12, range(4)) == 12 / 8 + (0.5 + 12 / 4)
    for odd in ({"ranks_per_machine": 2}, {"local_bandwidth": 1.0}):
        with pytest.raises(UserError, match=r"ranks_per_machine.*local_bandwidth"):
            replace(MACHINE, **odd)


def test_ranks_are_alike_unless_given():
    assert [MACHINE.speed(rank) for rank in range(3)] == [1, 1, 1]
    assert [MACHINE.memory_of(rank) for rank in range(3)] == [64, 64, 64]
    mixed = Hardware("mixed", 1.0, 1.0, 1.0, speeds=(1.0, 0.5), memories=[8.0, inf])
    assert [mixed.speed(rank) for rank in range(2)] == [1, 0.5]
    assert [mixed.memory_of(rank) for rank in range(2)] == [8, inf]


NUMBERS = {"flops": 1.0, "memory_bandwidth": 1.0, "link_bandwidth": 1.0}


@pytest.mark.parametrize("value", [-1.0, -inf, nan, "1e9"])
@pytest.mark.parametrize(
    "name", [*NUMBERS, "memory", "flops_in_16_bits", "link_latency"]
)
def test_rejects_a_number_out_of_range(name, value):
    with pytest.raises(UserError, match=f"{name}.*{value}"):
        Hardware("bad", **NUMBERS | {name: value})


@pytest.mark.parametrize(
    ("name", "given", "named"),
    [
        ("link_latency", inf, "link_latency.*inf"),
        ("speeds", (1.0, 0.0), r"speeds\[1\].*0\.0"),
        ("memories", (nan,), r"memories\[0\].*nan"),
    ],
)
def test_rejects_a_rank_s_number_out_of_range(name, given, named):
    with pytest.raises(UserError, match=named):
        Hardware("bad", **NUMBERS | {name: given})


@pytest.mark.parametrize("name", choices([CONF], "hardware"))
def test_a_preset_is_that_of_the_command_line(name):
    composed = instantiate(
        settings("memory", f"hardware={name}").hardware, _convert_="all"
    )
    assert vars(Hardware.preset(name)) | {"speeds": [], "memories": []} == vars(
        composed
    )


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(
        UserError, match=r"a100_nvlink.*a100_nvlink, ethernet_10, ethernet_100"
    ):
        Hardware.preset("a100")


def test_a_hardware_file_must_be_complete(monkeypatch, tmp_path):
    """A file that builds on another works on the command line only."""
    monkeypatch.setattr("toolkit.files._HOME", tmp_path)
    with pytest.raises(UserError, match="conf"):
        Hardware.preset("mine")
    folder = tmp_path / "conf" / "hardware"
    folder.mkdir(parents=True)
    whole = "name: mine\nflops: 2.0\nmemory_bandwidth: 1.0\nlink_bandwidth: 1.0\n"
    (folder / "mine.yaml").write_text(whole)
    (folder / "other.yaml").write_text("defaults: [mine, _self_]\nflops: 3.0\n")
    assert Hardware.preset("mine").flops == 2
    with pytest.raises(UserError, match=r"other\.yaml"):
        Hardware.preset("other")


@pytest.mark.parametrize("given", ["a100_nvlink", None])
def test_rejects_what_is_not_a_hardware(given):
    with pytest.raises(UserError, match=repr(given)):
        simulate(catalog.cyclic(2).lower(1), unit_costs(2), given)

"""Ranks of several devices in the explorer: by the numbers of ``simulate``, or one sentence."""

import html
import json

import pytest

from tests.experiments.command import run
from tests.figures.test_explorer_widget import number, said, shown
from toolkit.cost import Hardware, unit_costs
from toolkit.errors import UserError
from toolkit.figures import Explorer
from toolkit.figures.explorer.device_costs import hardware_of_ranks, model_costs
from toolkit.format import GIB, duration, size

MACHINE = "machines_of_8"
PIPELINE = ("one_f_one_b", 2, 4)


def explorer_of(model, schedule=PIPELINE, **options):
    explorer = Explorer(*schedule, **options)
    explorer.hardware.value = MACHINE
    explorer.costs.value = model
    return explorer


def simulated(folder, *arguments):
    """The row of a schedule, from what the command line writes."""
    finished = run(
        "simulate",
        "schedule=one_f_one_b",
        "stages=2",
        "microbatches=4",
        "model=vit_b_16",
        "batch=32",
        f"hardware={MACHINE}",
        *arguments,
        f"hydra.run.dir={folder}",
    )
    assert finished.status == 0, finished.err
    *_, row = json.loads((folder / "result.json").read_text())["metrics"]
    return row


def test_numbers_of_devices_are_those_of_simulate(tmp_path):
    explorer = explorer_of("vit_b_16", compare="one_f_one_b")
    for width in (1, 2):
        explorer.width.value = width
        assert said(explorer) == ""
        row = simulated(tmp_path / str(width), f"width={width}")
        assert number(explorer, "ranks") == str(row["ranks"]) == "2"
        seconds, _ = duration(row["ms a step"] / 1e3)
        assert number(explorer, "step time") == seconds
        assert number(explorer, "idle") == row["idle"].rstrip("%")
        assert number(explorer, "step time by DDP&#39;s") == row["by DDP's time"]
        of = "rank" if width == 1 else "device"
        fullest = size(row["GiB, fullest rank"] * GIB).split()[0]
        assert number(explorer, f"memory of the fullest {of}") == fullest
    assert number(explorer, "devices") == str(row["devices"]) == "4"
    # The words of the command's title.
    assert ", 2 devices a rank</small>" in shown(explorer)
    assert "no memory saved on the fullest device" in explorer.view.value
    assert "a device of each rank" in shown(explorer)
    assert explorer.to_html().count("2 devices a rank") == 2


@pytest.mark.parametrize("width", [2, 8])
def test_stages_of_no_model_take_no_width(width):
    for costs in (None, unit_costs(4)):
        explorer = Explorer(costs=costs, width=width)
        assert f"width={width} shares the stages of a model" in said(explorer)
        with pytest.raises(UserError):
            explorer.to_html()
        explorer.width.value = 1
        assert said(explorer) == ""


def test_what_devices_cannot_share_is_one_sentence():
    explorer = explorer_of("vit_b_16", width=8)
    assert html.unescape(said(explorer)) == (
        "width=8 does not divide the number of heads, 12: choose a divisor of it"
    )
    unlike = Hardware("unlike", 1e12, 1e12, 1e9, speeds=(1.0, 0.5))
    with pytest.raises(UserError, match=r"width=2 takes devices that are alike"):
        hardware_of_ranks(unlike, 2)
    with pytest.raises(UserError, match=r"^width is 1, 2, 4 or 8 .*got 3"):
        Explorer(width=3)


def test_costs_of_one_device_are_found_once_for_all_machines():
    costs = model_costs("vit_b_16")
    assert (
        model_costs("vit_b_16", n_devices=1, machine=Hardware.preset(MACHINE)) is costs
    )
    assert hardware_of_ranks(Hardware.preset(MACHINE), 1) == Hardware.preset(MACHINE)

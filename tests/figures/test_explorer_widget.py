"""The explorer in one process: controls, messages, exports and the static page."""

import html
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
from torch import nn

from tests.figures.test_explorer import CONF, choices, composed, made
from toolkit.cost import UNIT, Hardware, profile, unit_costs
from toolkit.errors import UserError
from toolkit.figures import Explorer
from toolkit.figures.explorer.inspection import FASTEST, settled
from toolkit.figures.explorer.widget import UNIFORM
from toolkit.model import partition
from toolkit.schedule import Schedule, catalog
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.plain_options import RANK_ORDERS

DEADLOCK = "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0"
CYCLIC = catalog.cyclic(2)
STUCK = Schedule.from_rank_orders(["0F0 0B0"], period=7)


def shown(explorer, k=0):
    return explorer.view.value.split('<div class="cdp-pane">')[1 + k]


def said(explorer, k=0):
    """The sentence of an impossible schedule, or nothing."""
    return html.unescape(
        "".join(re.findall('role="alert"><p>(.*?)</p>', shown(explorer, k)))
    )


def ops(explorer, k=0):
    return shown(explorer, k).count("<title>")


def number(explorer, name, k=0):
    return re.search(f">{name}</th><td[^>]*>([^<]*)<", shown(explorer, k))[1]


def visible(control):
    return control.layout.display is None


@pytest.fixture
def explorer():
    return Explorer("cdp_v2", 2, 2, compare="dp", n_steps=2)


def test_controls_change_the_figure_and_its_numbers(explorer):
    for control in (*explorer.shared, explorer.folder, *explorer.buttons):
        assert control.description
    assert ops(explorer) == ops(explorer, 1) == 2 * 8
    assert number(explorer, "peak activations") == "1.5"
    explorer.stages.value = explorer.microbatches.value = 4
    assert ops(explorer) == ops(explorer, 1) == 2 * 32
    assert [number(explorer, "peak activations", k) for k in (0, 1)] == ["2.5", "4"]
    explorer.n_steps.value = 1
    assert ops(explorer) == 32
    explorer.columns[0].options["delay"].value = 1
    assert number(explorer, "mean staleness") == "1"
    explorer.columns[0].options["placement"].value = "per_stage_and_microbatch"
    assert number(explorer, "ranks") == "10"
    for shows in (False, True):  # the second schedule
        explorer.compare.value = shows
        assert (visible(explorer.columns[1]), len(explorer.specs)) == (shows, 1 + shows)


@pytest.mark.parametrize("name", [*METHODS, RANK_ORDERS])
def test_every_schedule_can_be_chosen(explorer, name):
    """It brings its own options and defaults."""
    column = explorer.columns[0]
    # DualPipe needs two a stage.
    explorer.stages.value, explorer.microbatches.value = 4, 8
    before = shown(explorer)
    column.schedule.value = name
    assert said(explorer) == ""
    assert name == "cdp_v2" or shown(explorer) != before
    assert visible(column.orders) == (name == RANK_ORDERS)
    workers = name in ("dp", "zero_dp") or "cdp_" in name
    options = {
        "n_ranks": name != RANK_ORDERS and "n_ranks" in catalog.METHODS[name].options
    }
    options["accumulate"] = workers or name == "weipipe"
    options["delay"] = workers or name == RANK_ORDERS
    options |= dict.fromkeys(("chains", "groups"), "cdp_" in name)
    assert {option: visible(column.options[option]) for option in options} == options
    own = {"zero_cdp_v1": (1, "sharded"), "cdp_v2": ("freshest", "replicated")}
    held = column.options["delay"].value, column.options["state"].value
    assert held == own.get(name, held)


def test_late_weights_are_predicted(explorer):
    column, explorer.n_steps.value = explorer.columns[0], 3
    column.schedule.value = "cdp_v1"
    before = float(number(explorer, "weights of the fullest rank"))
    column.options["correction"].value = "extrapolate"
    assert float(number(explorer, "weights of the fullest rank")) > before
    assert "schedule.correction=extrapolate" in shown(explorer)
    assert "waits for: predict prediction stage 0" in shown(explorer)
    column.schedule.value = "gpipe"
    assert not visible(column.options["correction"])
    column.schedule.value = "cdp_v1"
    assert column.options["correction"].value == "none"
    column.options["correction"].value, column.options["state"].value = (
        "extrapolate",
        "sharded",
    )
    assert "correction=extrapolate takes state=" in said(explorer)


def test_workers_start_in_groups(explorer):
    options = explorer.columns[0].options
    explorer.microbatches.value = 4
    assert options["groups"].value == "each worker"
    options["groups"].value = 2
    assert explorer.specs[0].build() == catalog.cyclic(4, n_stages=2, groups=2)
    assert "schedule.groups=2" in explorer.to_html()
    options["groups"].value = 3
    assert "groups divides the 4 workers" in said(explorer)


def test_the_affordable_delay_is_that_of_the_machine(explorer):
    options = explorer.columns[0].options
    explorer.microbatches.value = explorer.stages.value = 4
    options["delay"].value = "affordable"
    fresh = catalog.cyclic(4).mean_staleness
    assert float(number(explorer, "mean staleness")) == fresh  # messages take no time
    explorer.hardware.value = "ethernet_10"
    assert float(number(explorer, "mean staleness")) == fresh  # nor do a few bytes
    slow = replace(UNIT, name="slow", link_bandwidth=0.5)
    late = Explorer("cdp_v1", 4, 4, delay="affordable", chains="rotated", hardware=slow)
    assert fresh < float(number(late, "mean staleness")) <= 1
    assert "schedule.delay=[[" in html.unescape(late.to_html())
    late.stages.value = 16
    late.microbatches.value = 5
    assert "at most 64 stages times micro-batches: got 80" in said(late)


def test_workers_accumulate(explorer):
    explorer.columns[1].options["accumulate"].value = 3
    assert ops(explorer, 1) == 3 * ops(explorer)
    assert number(explorer, "ranks", 1) == "2"
    assert explorer.specs[1].build() == catalog.data_parallel(2, accumulate=3)
    assert "schedule.accumulate=3" in explorer.to_html()


@pytest.mark.parametrize(
    ("control", "value", "sentence"),
    [
        ("delay", 0, "cannot read weights 0 steps late"),
        ("accumulate", 17, "at most 32 in a drawing: got 34"),
        ("orders", DEADLOCK, "rank 0 waits at 0B0 for 1B0"),
        ("orders", " ", "orders=()"),
        ("orders", "0F0 <b>", "<b>"),
        ("orders", " ".join(f"0F{m} 0B{m}" for m in range(33)), "got 33"),
    ],
)
def test_what_is_wrong_is_one_sentence_over_the_last_drawing(
    explorer, control, value, sentence
):
    column = explorer.columns[0]
    if control == "orders":
        column.schedule.value = RANK_ORDERS
    drawing = re.search("<h3>.*</svg>", shown(explorer), re.S)[0]
    {**column.options, "orders": column.orders}[control].value = value
    assert sentence in said(explorer)
    assert said(explorer, 1) == ""
    assert f'<div class="cdp-faded">{drawing}' in shown(explorer)
    if control == "delay":
        assert "[0F0]" in re.search("<pre>(.*)</pre>", shown(explorer), re.S)[1]
    with pytest.raises(UserError):
        explorer.to_html()
    column.schedule.value = "gpipe"
    assert said(explorer) == ""
    assert "cdp-faded" not in shown(explorer)


@pytest.mark.parametrize(
    "schedule",
    [
        catalog.cyclic(3, 1, n_stages=6),
        catalog.data_parallel(2, accumulate=3),
        Schedule.from_rank_orders(["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"], delay=1),
        Schedule.from_rank_orders(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]),
    ],
)
def test_a_schedule_is_explored_with_its_own_sizes_and_options(schedule):
    first, second = Explorer(schedule, compare=schedule).specs
    assert first.build() == second.build() == schedule


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("dp", {"compare": 3}, "schedule .*got 3"),
        ("dp", {"n_steps": 7}, "n_steps .*got 7"),
        ("dp", {"hardware": "a100"}, "hardware .*'a100'"),
        ("cdpv2", {}, r"schedule 'cdpv2': did you mean cdp_v2\?"),
        ("dp", {"orders": ["0F0"]}, "orders.*got schedule='dp'"),
        ("gpipe", {"delay": 1}, "gpipe has no delay, got 1"),
        ("cdp_v2", {"accumulate": 0}, "accumulate .*got 0"),
        ("pipedream_2bw", {"stages": 3, "microbatches": 2}, "got 2 for 3"),
        *(("dp", {"stages": n}, f"stages .*got {n!r}") for n in (0, 33, "4", None)),
        (CYCLIC, {"delay": 1, "orders": ["0F0"]}, "leave out delay, orders"),
        (CYCLIC, {"compare": catalog.cyclic(3)}, "2 x 2 and 3 x 3"),
        (CYCLIC, {"compare": STUCK}, "no spec makes"),
        (CYCLIC, {"compare": catalog.gpipe(2, 33)}, "microbatches .*got 33"),
    ],
)
def test_arguments_that_no_control_can_hold(schedule, options, message):
    with pytest.raises(UserError, match=message):
        Explorer(schedule, **options)


def test_costs_and_hardware_of_your_own():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    example = torch.rand(2, 8, device="meta")

    def costs(n_stages):
        return profile(partition(model, n_stages, example), example)

    slow = Hardware("slow", flops=1e6, memory_bandwidth=1e6, link_bandwidth=1e6)
    explorer = Explorer(stages=2, microbatches=2, costs=costs, hardware=slow)
    by_model = number(explorer, "step time")
    given = Explorer(stages=2, microbatches=2, costs=costs(2), hardware=slow)
    assert number(given, "step time") == by_model
    given.stages.value = 3
    assert "3 stages" in said(given)
    explorer.hardware.value = "ethernet_10"
    assert number(explorer, "step time") != by_model
    explorer.stages.value = 5
    assert "1 to 4 stages: got 5" in said(explorer)
    assert "<pre>" not in shown(explorer)


def test_hardware_is_read_from_the_configuration_if_it_exists(monkeypatch, tmp_path):
    assert [*Explorer().hardware.options] == ["unit", *choices([CONF], "hardware")]
    monkeypatch.setattr("toolkit.files._HOME", tmp_path)
    with pytest.warns(UserWarning, match="no configuration in"):
        assert [*Explorer().hardware.options] == ["unit"]


def test_other_costs_are_simulated_once(monkeypatch):
    """Though the machine changes with them."""
    explorer = Explorer(costs=unit_costs(4))
    assert explorer.hardware.value != "unit"
    explorer.costs.value, explorer.hardware.value = UNIFORM, "unit"
    simulated = []

    def counted(*arguments):
        simulated.append(1)
        return settled(*arguments)

    monkeypatch.setattr("toolkit.figures.explorer.widget.settled", counted)
    explorer.costs.value = "given"
    assert explorer.hardware.value != "unit"
    assert len(simulated) == 1


def test_exports(explorer, tmp_path):
    folder = tmp_path / "new"
    explorer.folder.value = str(folder)
    explorer.columns[1].schedule.value = "gpipe"
    for button in explorer.buttons:
        button.click()
        assert f"written: {folder}" in explorer.status.value
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "cdp_v2_2x2.csv",
        "cdp_v2_2x2.trace.json",
        "cdp_v2_2x2_and_gpipe_2x2.png",
        "cdp_v2_2x2_and_gpipe_2x2.svg",
        "gpipe_2x2.csv",
        "gpipe_2x2.trace.json",
    ]
    assert Schedule.from_csv(folder / "gpipe_2x2.csv", name="GPipe") == catalog.gpipe(
        2, 2
    )
    spans = pd.read_csv(folder / "cdp_v2_2x2.csv")
    first = spans[(spans.lane == "compute") & (spans.step == 0)].set_index("name")
    assert (
        first.start.to_dict() | {"0F0": 0, "1F0": 1, "0F1": 2} == first.start.to_dict()
    )
    events = json.loads((folder / "gpipe_2x2.trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "compute"} >= {
        "0F0",
        "1B1",
    }
    explorer.columns[1].schedule.value = "cdp_v2"
    explorer.columns[1].options["placement"].value = "per_stage"
    names = [path.name for path in explorer.export("trace")]  # one name is numbered
    assert names == ["cdp_v2_2x2_1.trace.json", "cdp_v2_2x2_2.trace.json"]


def test_rank_orders_survive_python_and_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "0F0 0F1 0B0 0B1\n\n1F0 1B0 1F1 1B1\n"
    for options in ({}, {"delay": 1, "correction": "extrapolate"}):
        explorer = Explorer(RANK_ORDERS, orders=text, **options)
        (spec,), (path,) = explorer.specs, explorer.export("csv")
        assert path.name == "rank_orders.csv"
        read = composed(spec.overrides())
        assert replace(read, name="rank orders") == spec.build() == made(spec.python())


def test_exports_say_why_not(explorer, tmp_path):
    (tmp_path / "taken").write_text("")
    explorer.folder.value = str(tmp_path / "taken" / "below")
    explorer.buttons[1].click()
    assert "Not a directory" in explorer.status.value
    explorer.folder.value = str(tmp_path)
    explorer.columns[0].options["delay"].value = 0
    explorer.buttons[1].click()
    assert "impossible" in explorer.status.value
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_static_page_stands_alone(explorer):
    page = explorer.to_html()
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("<title>") - 1 == ops(explorer) + ops(explorer, 1)
    assert "catalog.data_parallel(n=2, n_stages=2)" in page
    assert [
        ElementTree.fromstring(svg).get("aria-label")
        for svg in re.findall("<svg.*?</svg>", page, re.S)
    ] == ["CDP-v2: ops of 2 training steps", "DP: ops of 2 training steps"]
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == page


def test_a_model_is_cut_and_summed_in_its_fastest_form_unless_chosen():
    explorer = Explorer("cdp_v1", 2, 2, hardware=Hardware.preset("ethernet_10"))
    assert not visible(explorer.batch)
    assert not visible(explorer.partition)
    explorer.costs.value = "resnet18"
    assert visible(explorer.batch)
    assert (
        explorer.partition.value
        == explorer.columns[0].options["chains"].value
        == FASTEST
    )
    fastest = float(number(explorer, "step time by DDP&#39;s"))
    for cut in ("flops", "parameters"):
        explorer.partition.value = cut
        for chains in ("in_order", "rotated"):
            explorer.columns[0].options["chains"].value = chains
            heading = {
                "in_order": "CDP-v1 <small>in order",
                "rotated": "CDP-v1 rotated <small>",
            }
            assert heading[chains] in shown(explorer)
            assert f"by {cut}</small>" in shown(explorer)
            assert float(number(explorer, "step time by DDP&#39;s")) >= fastest
    explorer.partition.value = explorer.columns[0].options["chains"].value = FASTEST
    assert float(number(explorer, "step time by DDP&#39;s")) == fastest
    explorer.batch.value = 256
    assert float(number(explorer, "step time by DDP&#39;s")) != fastest

"""The explorer in one process: controls, messages, exports and the static page."""

import csv
import html
import json
import re
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from toolkit.cost import Hardware, profile, unit_costs
from toolkit.errors import UserError
from toolkit.figures import Explorer
from toolkit.figures.explorer.choice import OWN, SCHEDULES
from toolkit.figures.explorer.controls import UNIFORM
from toolkit.figures.explorer.inspection import predict
from toolkit.model import partition
from toolkit.schedule import Schedule, catalog

DEADLOCK = "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0"


class Untraceable(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


def shown(explorer, k=0):
    return explorer.columns[k].figure.value


def said(explorer, k=0):
    return html.unescape(re.sub("<[^>]+>", "", explorer.columns[k].message.value))


def ops(explorer, k=0):
    return shown(explorer, k).count("<title>")


def number(explorer, name, k=0):
    found = re.search(f">{name}</th><td[^>]*>([^<]*)<", shown(explorer, k))
    return found[1]


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
    explorer.columns[0].delay.value = 1
    assert number(explorer, "mean staleness") == "1"
    explorer.columns[0].placement.value = "per_stage_and_microbatch"
    assert number(explorer, "ranks") == "10"


def test_scales_follow_what_stands_beside(explorer):
    before = shown(explorer)
    explorer.columns[1].schedule.value = "gpipe"
    assert shown(explorer) != before
    explorer.columns[1].schedule.value = "dp"
    assert shown(explorer) == before


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_can_be_chosen(explorer, name):
    column = explorer.columns[0]
    before = shown(explorer)
    explorer.stages.value = explorer.microbatches.value = 4
    column.schedule.value = name
    assert said(explorer) == ""
    assert shown(explorer) != before
    assert column.orders.layout.display == (None if name == OWN else "none")
    assert column.n_ranks.layout.display == (None if name == "interleaved_1f1b" else "none")
    accumulates = name in ("dp", "zero_dp") or "cdp_" in name
    assert column.accumulate.layout.display == (None if accumulates else "none")
    assert all((column.delay.label, column.placement.label, column.state.label))
    assert column.delay.disabled == (name not in (OWN, "dp", "zero_dp") and "cdp_" not in name)


@pytest.mark.parametrize(
    ("name", "delay", "state"),
    [("zero_cdp_v1", 1, "sharded"), ("cdp_v2", "freshest", "replicated"), ("dp", 0, "replicated")],
)
def test_a_schedule_brings_its_own_options(explorer, name, delay, state):
    column = explorer.columns[0]
    column.schedule.value = "gpipe"
    column.schedule.value = name
    assert (column.delay.value, column.state.value) == (delay, state)


def test_late_weights_are_predicted(explorer):
    column, explorer.n_steps.value = explorer.columns[0], 3
    column.schedule.value = "cdp_v1"
    before = float(number(explorer, "weights of the fullest rank"))
    column.predict.value = True
    assert said(explorer) == ""
    assert float(number(explorer, "weights of the fullest rank")) > before
    assert "predict=True" in column.lines.value
    assert "as predicted from 1 (1 step late" in shown(explorer)
    column.schedule.value = "gpipe"
    assert column.predict.layout.display == "none"
    column.schedule.value = "cdp_v1"
    assert column.predict.value is False
    column.predict.value, column.state.value = True, "sharded"
    assert "predict=True takes state=" in said(explorer)


def test_workers_accumulate(explorer):
    column = explorer.columns[1]
    column.accumulate.value = 3
    assert ops(explorer, 1) == 3 * ops(explorer)
    assert number(explorer, "ranks", 1) == "2"
    assert explorer.choices[1].build() == catalog.data_parallel(2, accumulate=3)
    for line in ("catalog.data_parallel(2, accumulate=3)", "schedule.accumulate=3"):
        assert line in column.lines.value
        assert line in explorer.to_html()
    column.schedule.value = "cdp_v1"
    assert column.accumulate.value == 1
    assert Explorer("cdp_v1", 2, 2, accumulate=3).choices[0].accumulate == 3


def test_a_second_schedule_shows_on_demand():
    explorer = Explorer()
    box = explorer.columns[1].box
    assert (box.layout.display, shown(explorer, 1)) == ("none", "")
    explorer.compare.value = True
    assert box.layout.display is None
    assert ops(explorer, 1) > 0
    assert len(explorer.choices) == 2


@pytest.mark.parametrize(
    ("control", "value", "sentence"),
    [
        ("delay", 0, "cannot read weights 0 steps late"),
        ("accumulate", 17, "at most 32 micro-batches can be drawn: got 17 x 2"),
        ("orders", DEADLOCK, "rank 0 waits at 0B0 for 1B0"),
        ("orders", "0F0 0X0", "0X0&#x27; is not an op"),
        ("orders", " ", "there are no rank orders"),
        ("orders", "0F0 <b>", "&lt;b&gt;"),
        ("orders", " ".join(f"0F{m} 0B{m}" for m in range(33)), "from 1 to 32: got 33"),
        ("orders", "0F0 0B0 9F9 9B9", "9F9 is given, but no op of stage 1"),
    ],
)
def test_what_is_wrong_is_one_sentence_over_the_last_drawing(explorer, control, value, sentence):
    column = explorer.columns[0]
    if control == "orders":
        column.schedule.value = OWN
    before = shown(explorer)
    getattr(column, control).value = value
    if control == "delay":
        assert "[0F0]" in re.search("<pre>(.*)</pre>", column.message.value, re.S)[1]
    form = r'<div [^>]*role="alert"><p>([^\n]*?)</p>(<pre>.*</pre>)?</div>'
    assert sentence in re.fullmatch(form, column.message.value, re.S)[1]
    assert shown(explorer) == f'<div class="cdp-faded" inert="inert">{before}</div>'
    with pytest.raises(UserError):
        explorer.to_html()
    column.schedule.value = "gpipe"
    assert said(explorer) == ""
    assert "cdp-faded" not in shown(explorer)


def test_fewer_microbatches_than_the_schedule_needs(explorer):
    explorer.columns[0].schedule.value = "pipedream_2bw"
    explorer.stages.value = 3
    assert "PipeDream-2BW takes a micro-batch a stage or more: got 2 for 3" in said(explorer)
    assert said(explorer, 1) == ""


def test_an_op_is_looked_up(explorer):
    explorer.columns[0].wanted.value = "1F0"
    assert "1F0 of step 0: forward of stage 1" in explorer.columns[0].found.value
    explorer.stages.value = 3
    assert "1F0 of step 0" in explorer.columns[0].found.value
    explorer.columns[0].wanted.value = ""
    assert explorer.columns[0].found.value == ""


def test_a_schedule_is_explored_as_it_is():
    """With its own sizes and options, and another beside it."""
    cyclic = catalog.cyclic(3, 1, n_stages=6)
    shown = Explorer(cyclic, compare=catalog.data_parallel(3, n_stages=6))
    assert [choice.build() for choice in shown.choices] == [
        cyclic,
        catalog.data_parallel(3, n_stages=6),
    ]
    mine = Schedule.from_rank_orders(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    assert Explorer(mine).choices[0].build() == mine
    text = "0F0 0F1 0B0 0B1\n\n1F0 1B0 1F1 1B1\n"
    assert Explorer(OWN, orders=text).choices[0].build() == mine


CYCLIC = catalog.cyclic(2)
STUCK = Schedule.from_rank_orders(["0F0 0B0"], period=7)


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("dp", {"compare": 3}, "schedule .*got 3"),
        ("dp", {"n_steps": 7}, "n_steps .*got 7"),
        ("dp", {"hardware": "a100"}, "hardware .*'a100'"),
        ("cdpv2", {}, r"schedule 'cdpv2': did you mean cdp_v2\?"),
        ("dp", {"orders": ["0F0"]}, "orders .*got 'dp'"),
        ("gpipe", {"delay": 1}, "gpipe has no delay, got 1"),
        ("cdp_v2", {"accumulate": 0}, "accumulate .*got 0"),
        *(("dp", {"stages": n}, f"stages .*got {n!r}") for n in (0, 33, "4", None)),
        (CYCLIC, {"delay": 1, "orders": ["0F0"]}, "leave out delay, orders"),
        (CYCLIC, {"compare": catalog.cyclic(3)}, "2 stages and 2 .* 3 and 3"),
        (CYCLIC, {"compare": STUCK}, "no controls of the explorer make"),
        (CYCLIC, {"compare": catalog.gpipe(2, 33)}, "microbatches .*got 33"),
    ],
)
def test_arguments_that_no_control_can_hold(schedule, options, message):
    with pytest.raises(UserError, match=message):
        Explorer(schedule, **options)


def test_costs_and_hardware_of_your_own():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    example = torch.rand(2, 8, device="meta")
    slow = Hardware("slow", flops=1e6, memory_bandwidth=1e6, link_bandwidth=1e6)
    explorer = Explorer(stages=2, microbatches=2, model=model, example=example, hardware=slow)
    by_model = number(explorer, "step time")
    assert said(explorer) == ""
    costs = profile(partition(model, 2, example), example)
    given = Explorer(stages=2, microbatches=2, costs=costs, hardware=slow)
    assert number(given, "step time") == by_model
    given.stages.value = 3
    assert "3 stages" in said(given)
    explorer.hardware.value = "ethernet_10"
    assert number(explorer, "step time") != by_model
    explorer.stages.value = 4
    assert said(explorer) == ""


def test_other_costs_are_simulated_once(monkeypatch):
    """Though the machine changes with them."""
    explorer = Explorer(costs=unit_costs(4))
    assert explorer.hardware.value != "unit"
    explorer.costs.value, explorer.hardware.value = UNIFORM, "unit"
    simulated = []

    def counted(*arguments):
        simulated.append(1)
        return predict(*arguments)

    monkeypatch.setattr("toolkit.figures.explorer.widget.predict", counted)
    explorer.costs.value = "given"
    assert explorer.hardware.value != "unit"
    assert len(simulated) == 1


@pytest.mark.parametrize(
    ("model", "example", "sentence"),
    [
        (Untraceable(), torch.rand(2, 8), "torch.fx cannot trace Untraceable"),
        (nn.Linear(8, 8), None, "give a micro-batch"),
        (nn.Linear(8, 8), torch.rand(2, 9), "cannot train on an example of shape"),
    ],
)
def test_a_model_that_cannot_be_profiled(model, example, sentence):
    explorer = Explorer(stages=1, microbatches=1, model=model, example=example)
    assert sentence in said(explorer)
    assert "<pre>" not in explorer.columns[0].message.value


def test_exports(explorer, tmp_path):
    folder = tmp_path / "new"
    explorer.folder.value = str(folder)
    explorer.columns[1].schedule.value = "gpipe"
    for button in explorer.buttons:
        button.click()
        assert "written: " in explorer.status.value
        assert str(folder) in explorer.status.value
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "cdp_v2_2x2.csv",
        "cdp_v2_2x2.trace.json",
        "cdp_v2_2x2_and_gpipe_2x2.png",
        "cdp_v2_2x2_and_gpipe_2x2.svg",
        "gpipe_2x2.csv",
        "gpipe_2x2.trace.json",
    ]
    assert Schedule.from_csv(folder / "gpipe_2x2.csv", name="GPipe") == catalog.gpipe(2, 2)
    table = csv.DictReader((folder / "cdp_v2_2x2.csv").read_text().splitlines())
    starts = {row["op"]: (row["slot"], row["rank"], row["staleness"]) for row in table}
    assert len(starts) == 8
    assert (starts["0F0"], starts["0F1"]) == (("0", "0", "1"), ("2", "1", "0"))
    assert starts["1F0"] == ("1", "0", "0")
    events = json.loads((folder / "gpipe_2x2.trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "compute"} >= {"0F0", "1B1"}


def test_exports_of_one_name_are_numbered(explorer, tmp_path):
    """Side by side a schedule may stand with other options."""
    explorer.folder.value = str(tmp_path)
    explorer.columns[1].schedule.value = "cdp_v2"
    explorer.columns[1].placement.value = "per_stage"
    assert [path.name for path in explorer.export_trace()] == [
        "cdp_v2_2x2_1.trace.json",
        "cdp_v2_2x2_2.trace.json",
    ]
    alike, pipeline = explorer.export_csv()
    assert alike.read_text().startswith("op,kind")
    assert Schedule.from_csv(pipeline, period=4, delay="freshest").n_ranks == 2
    for column in explorer.columns:
        column.schedule.value = OWN
    explorer.columns[1].orders.value = "0F0 0B0"
    first, second = explorer.export_csv()
    assert (first.name, second.name) == ("rank_orders_1.csv", "rank_orders_2.csv")
    assert (first.read_text().count("\n"), second.read_text()) == (2, "0F0,0B0\n")


def test_exports_say_why_not(explorer, tmp_path):
    (tmp_path / "taken").write_text("")
    explorer.folder.value = str(tmp_path / "taken" / "below")
    explorer.buttons[1].click()
    assert "Not a directory" in explorer.status.value
    explorer.folder.value = str(tmp_path)
    explorer.columns[0].delay.value = 0
    explorer.buttons[1].click()
    assert "mend it first" in explorer.status.value
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_the_static_page_stands_alone(explorer):
    page = explorer.to_html()
    assert "<script" not in page
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("<title>") - 1 == ops(explorer) + ops(explorer, 1)
    assert "catalog.data_parallel(2)" in page
    body = re.search("<body[^>]*>(.*)</body>", page, re.S)[1].replace("readonly ", 'readonly="" ')
    svgs = re.findall("<svg.*?</svg>", body, re.S)
    assert [ElementTree.fromstring(svg).get("aria-label") for svg in svgs if "cdp-grid" in svg] == [
        "CDP-v2: ops of 2 training steps",
        "DP: ops of 2 training steps",
    ]


def test_where_widgets_cannot_be_shown_there_is_the_page(explorer):
    bundle = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == explorer.to_html()

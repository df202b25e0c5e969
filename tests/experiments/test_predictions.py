"""memory, communication, pipelines and simulate end to end: what they print, write and refuse."""

import json
import os
import re
import shlex

import pytest
import torch

from tests.experiments.command import (
    assert_figures,
    cases,
    complete,
    refused,
    rows,
    run,
    succeeded,
)
from tests.thorough import THOROUGH, thorough
from tests.warm_python import run_ranks
from toolkit.cli import build_schedule, settings
from toolkit.cli.hydra_args import quoted
from toolkit.cost import memory_curve
from toolkit.cost.cost_file import COLUMNS
from toolkit.cost.pipeline_table import PIPELINES
from toolkit.files import EXPERIMENTS
from toolkit.model import build

SMALL = ("model=resnet8", "shape=[3,16,16]", "classes=10", "batch=4")
MINE = """
from torch import nn

def mine(width=4):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 36, 2))

def broken():
    return 7
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package of the user's in the current folder."""
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_package.mine"


@pytest.mark.parametrize("measured", [(), ("axis=measured", "device=cpu")])
def test_memory(tmp_path, measured):
    succeeded("memory", tmp_path, *SMALL, "workers=[2,4]", *measured)
    assert_figures(tmp_path, "memory")
    found = rows(tmp_path / "memory.csv")
    axes = ("roofline", "flops", "bytes", *(["measured"] if measured else []))
    assert {(row["axis"], row["workers"]) for row in found} == {
        (axis, n) for axis in axes for n in "24"
    }
    for row in found:
        assert 0 < float(row["reduction"]) <= float(row["largest_reduction"]) + 1e-9


@thorough
def test_memory_where_stages_compute_again(tmp_path):
    """It prints how to train so."""
    options = (
        "model=resnet8",
        "shape=[3,8,8]",
        "classes=10",
        "batch=4",
        "stages=4",
        "workers=[2]",
    )
    folder = tmp_path / "it's $a"
    folder.mkdir()
    out = succeeded("memory", quoted(str(folder)), *options, "extra_time=0.2")
    found = json.loads((folder / "result.json").read_text())["metrics"]
    (row,) = (row for row in found if row["axis"] == "stages")
    assert 0 < row["extra_time"] <= 0.2
    assert row["peak_bytes_shifted"] < 0.75 * row["peak_bytes_together"]
    (command,) = re.findall(r"cyclic-dp train (.*)", out)
    assert f"checkpoint={row['recomputed']}".replace(" ", "") in command
    short = (
        "data=synthetic",
        "data.image_size=8",
        "data.n_train=16",
        "data.n_test=8",
        "epochs=1",
    )
    complete(
        "train",
        tmp_path / "b",
        *shlex.split(command),
        "model=resnet8",
        "batch=4",
        *short,
    )


def test_memory_in_16_bits(tmp_path):
    result = complete("memory", tmp_path, *SMALL, "precision=bf16", "workers=[2]")
    assert result["provenance"]["device"] == "meta tensors"
    example = torch.empty(4, 3, 16, 16, device="meta")
    full, cast = (
        memory_curve(
            build("resnet8", 10, 16), example, "flops", precision=precision
        ).peak
        for precision in ("fp32", "bf16")
    )
    assert result["metrics"][0]["peak_bytes_together"] == 2 * cast < 2 * full


def test_memory_of_the_users_own_model(own, tmp_path):
    options = ("+model.arguments.width=2", "shape=[3,8,8]", "batch=2", "workers=[2]")
    assert f"{own} in fp32" in succeeded(
        "memory", tmp_path, f"model.target={own}", *options
    )


@pytest.mark.parametrize("experiment", ["memory", "simulate"])
def test_decoder_is_analysed_in_its_usual_length(experiment, tmp_path):
    """Its activations: 1024 tokens of each layer, and attention's as one kernel keeps it."""
    small = ("model=gpt", "model.layers=2", "model.width=8", "batch=1", "workers=2")
    assert "gpt" in succeeded(experiment, tmp_path, *small)
    if experiment == "memory":
        kept = float(rows(tmp_path / "memory.csv")[0]["peak_bytes_together"]) / 2
        # By the numbers of one layer's output.
        assert 10 < kept / (1024 * 8 * 4) < 2 * 30 + 10


@pytest.mark.parametrize("experiment", ["memory", "simulate"])
def test_refuses_a_model_that_does_not_take_the_shape(experiment, own):
    given = f"model.target={own}", "shape=[16]", "batch=2", "workers=2"
    refused(experiment, *given, match=r"Sequential.* shape \[2, 16\]")


def test_communication(tmp_path):
    found = complete("communication", tmp_path, "workers=3")["metrics"]
    assert len(found) == 15
    shared = [
        row["ranks"] for row in found if row["setting"] == "with model parallelism"
    ]
    assert shared == [9, 6, 6]


def test_communication_fails_where_a_formula_differs(monkeypatch, tmp_path):
    from toolkit.schedule import paper_table

    right = paper_table.formula

    def wrong(setting, rule, n):
        found = right(setting, rule, n)
        return found | {"ranks": found["ranks"] + (setting == "ZeRO")}

    monkeypatch.setattr(paper_table, "formula", wrong)
    finished = run("communication", "workers=2", f"hydra.run.dir={tmp_path}")
    assert finished.status == 1
    assert "ZeRO, DP: ranks is 3 by its formula and 2 as counted" in finished.err


def test_pipelines(tmp_path):
    out = succeeded("pipelines", tmp_path, "ranks=2", "microbatches=[2,5,2]")
    assert_figures(tmp_path, "pipelines")
    found = rows(tmp_path / "pipelines.csv")
    assert [row["microbatches"] for row in found] == ["2"] * 26 + ["5"] * 16
    (gpipe,) = (r for r in found if (r["method"], r["microbatches"]) == ("GPipe", "5"))
    assert (float(gpipe["activations"]), float(gpipe["idle"])) == pytest.approx(
        (2.5, 1 / 6)
    )
    assert gpipe["flush"] == "True"
    assert "5 micro-batches, without CDP-v2: " in out
    left_out = json.loads((tmp_path / "result.json").read_text())["left_out"]
    pipelines = [each for each in left_out if each["method"] in PIPELINES]
    assert [(each["microbatches"], each["method"]) for each in pipelines] == [
        *((2, method) for method in ("DualPipe", "DualPipeV")),
        *(
            (5, method)
            for method in ("interleaved 1F1B", "DualPipe", "CDP-v1", "CDP-v2")
        ),
    ]


def test_pipelines_of_one_number_of_microbatches(tmp_path):
    succeeded("pipelines", tmp_path, "ranks=1", "microbatches=2")
    assert {row["idle"] for row in rows(tmp_path / "pipelines.csv")} == {"0.0"}


@thorough
def test_situations(tmp_path):
    accuracies = EXPERIMENTS / "results" / "digits_topk"
    options = ["compressions=[none,topk]", f"accuracies={accuracies}"]
    on_one_machine = ["machines=[ethernet_10]", "batches.resnet50=[32]"]
    options += [*on_one_machine, "~models.gpt2", "~batches.gpt2"]
    out = succeeded("situations", tmp_path, "workers=[2,3]", "ratios=[2]", *options)
    assert_figures(tmp_path, "time_to_accuracy")
    result = json.loads((tmp_path / "result.json").read_text())
    names = {row["name"] for row in result["accuracies"]}
    assert names == {"DDP whole", "DDP top-k", "CDP-v1 top-k", "CDP-v2 top-k"}
    found = rows(tmp_path / "situations.csv")
    assert [(row["workers"], row["ratio"], row["devices"]) for row in found] == [
        *(("3", "0.0", devices) for devices in "163"),
        *((n, "2.0", n) for n in "23"),
    ]
    assert "9 → 6" in out


@pytest.mark.parametrize("schedule", ["zero_bubble", "v_half", "zero_cdp_v2"])
def test_simulate(schedule, tmp_path):
    succeeded(
        "simulate",
        tmp_path,
        *SMALL,
        f"schedule={schedule}",
        "stages=2",
        "microbatches=4",
    )
    assert_figures(tmp_path, "timeline")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"M", "X", "C"}
    assert float(rows(tmp_path / "simulation.csv")[0]["samples/s"]) > 0


def test_simulate_with_measured_stages(tmp_path):
    """They are timed once: a schedule next to itself has another label, and the same time."""
    options = ("measured=true", "device=cpu", "stages=2", "microbatches=2", "steps=2")
    also = ("schedule=gpipe", "+schedule@also.again=gpipe")
    assert "stages timed on" in succeeded("simulate", tmp_path, *SMALL, *options, *also)
    first, again = rows(tmp_path / "simulation.csv")[1:]
    assert (first.pop("schedule"), again.pop("schedule")) == (
        "GPipe (schedule)",
        "GPipe (again)",
    )
    assert first == again


@thorough
def test_simulate_counts_optimizer_state_and_recomputation(tmp_path):
    def predicted(name, *options):
        on_one = "schedule=dp", "schedule.placement=one"
        (row,) = complete("simulate", tmp_path / name, *SMALL, *options, *on_one)[
            "metrics"
        ]
        return row["GiB, fullest rank"], row["ms a step"]

    usual = predicted("usual")
    assert usual[0] < predicted("state", "optimizer_words=200")[0]
    gigabytes, milliseconds = predicted("recomputing", "checkpoint=[0,1]")
    assert usual[0] > gigabytes
    assert usual[1] < milliseconds


def test_simulate_several_schedules(tmp_path):
    also = ("schedule=dp", "+schedule@also.cyclic=cdp_v2", "stages=2", "microbatches=2")
    found = complete("simulate", tmp_path, *SMALL, *also)["metrics"]
    assert [row["schedule"] for row in found] == ["DDP", "DP", "CDP-v2"]
    assert found[0]["by DDP's time"] == "1.00"
    ranks = [(row["schedule"], row["rank"]) for row in rows(tmp_path / "ranks.csv")]
    assert ranks == [(name, rank) for name in ("DDP", "DP", "CDP-v2") for rank in "01"]


def test_simulate_several_devices_a_rank(tmp_path):
    """DDP has as many devices, whether a model has a plan or shares its weights alone."""
    options = ("stages=2", "microbatches=4", "batch=2", "schedule=gpipe", "width=2")
    gpt = ("model=gpt", "model.layers=1", "model.width=16", "shape=[8]", "classes=32")
    for name, model in (("gpt", gpt), ("resnet", SMALL)):
        found = complete("simulate", tmp_path / name, *model, *options)
        baseline, pipeline = found["metrics"]
        assert (baseline["ranks"], baseline["devices"]) == (4, 4)
        assert (pipeline["ranks"], pipeline["devices"]) == (2, 4)


@thorough
def test_simulate_finds_messages_that_cost_late_weights_no_time(tmp_path):
    """Half of ResNet-8 is in its last stage, whose whole messages the others wait for."""
    options = (*SMALL, "stages=4", "microbatches=4", "hardware.link_latency=0")
    options += ("hardware.link_bandwidth=1e8",)
    _, best = complete("simulate", tmp_path / "a", *options, "schedule=cdp_v1")[
        "metrics"
    ]
    assert best["form"] == "rotated, by parameters"
    given = "schedule=cdp_v1", "chains=given", "partition=flops"
    _, usual = complete("simulate", tmp_path / "b", *options, *given)["metrics"]
    assert usual["form"] == "in order, by flops"
    assert best["ms a step"] < 0.9 * usual["ms a step"]
    same_form = "schedule.chains=rotated", "chains=given", "partition=parameters"
    _, same = complete(
        "simulate", tmp_path / "c", *options, "schedule=cdp_v1", *same_form
    )["metrics"]
    assert (same["ms a step"], same["form"]) == (best["ms a step"], best["form"])


def test_simulate_prices_compressed_messages_and_their_rivals(tmp_path):
    options = (
        *SMALL,
        "schedule=cdp_v1",
        "stages=2",
        "workers=2",
        "hardware=ethernet_10",
    )
    rows = complete("simulate", tmp_path, *options, "compression=int8")["metrics"]
    assert [row["schedule"] for row in rows][2:] == [
        "DDP int8",
        "DDP powersgd rank 4",
        "DDP powersgd rank 2",
        "local SGD every 8",
    ]
    assert rows[0]["accuracy"] == "exact"
    assert len({row["accuracy"] for row in rows}) == 6
    refused("simulate", "compression=int8", "schedule=dp", *SMALL, match="int8")


def test_simulate_prices_compressed_activations(tmp_path):
    options = (*SMALL, "schedule=one_f_one_b", "stages=2", "microbatches=4")
    options += ("hardware=ethernet_10",)
    words = {"int4": "activations in 4 bits"}
    if THOROUGH:
        words = {"none": "exact", "bf16": "activations in 16 bits", **words}
    seconds = []
    for compression, accuracy in words.items():
        given = f"boundary_compression={compression}"
        found = complete("simulate", tmp_path / compression, *options, given)
        _, row = found["metrics"]
        assert row["accuracy"] == accuracy
        seconds.append(row["ms a step"])
    assert seconds == sorted(seconds, reverse=True)
    assert len({*seconds}) == len(words)
    width = "width=2", "boundary_compression=int8"
    refused("simulate", *options, *width, match="width=2 takes no boundary")


def test_simulate_takes_the_delay_that_the_links_allow(tmp_path):
    options = (*SMALL, "stages=4", "microbatches=4", "partition=parameters")
    options += ("hardware.link_latency=0", "hardware.link_bandwidth=1e8")
    also = ("+schedule@also.late=cdp_v1", "also.late.chains=rotated")
    own = ("schedule.chains=rotated", "schedule.delay={within: 0.3}")
    found = complete("simulate", tmp_path, *options, *also, *own)["metrics"]
    _, affordable, late = found
    assert affordable["ms a step"] <= 1.3 * late["ms a step"]
    assert 0.375 < affordable["mean staleness"] < late["mean staleness"] == 1


def test_simulate_takes_costs_from_a_file(tmp_path):
    """Zero bubbles depend on the time of gradients of weights."""
    milliseconds = {}
    for name, parts in (("even", "10,10"), ("uneven", "16,4")):
        costs = tmp_path / f"{name}.csv"
        costs.write_text("\n".join([",".join(COLUMNS), *[f"10,{parts},100,1,4"] * 2]))
        options = (
            "schedule=zero_bubble",
            "stages=2",
            "microbatches=4",
            "hardware=h200_nvlink",
        )
        rows = complete("simulate", tmp_path / name, f"costs={costs}", *options)[
            "metrics"
        ]
        milliseconds[name] = rows[-1]["ms a step"]
    assert milliseconds["even"] < milliseconds["uneven"]
    refused("simulate", f"costs={costs}", "schedule=zb_v", match="2 rows.* stages=2")

    options = "ranks=2", "microbatches=[2]"
    rows = complete("pipelines", tmp_path / "pipelines", f"costs={costs}", *options)[
        "metrics"
    ]
    seconds = {row["method"]: row["seconds"] for row in rows}
    # 2 ranks, 2 micro-batches: 3 of 30 ms.
    assert seconds["GPipe"] == pytest.approx(0.09)
    assert "ZB-V" not in seconds  # has two stages a rank
    refused("plan", f"costs={costs}", "ranks=2", match="batch")
    refused("plan", f"costs={costs}", "data=digits", match="data=")


def test_plan_measures_the_links_of_its_job(tmp_path):
    costs = tmp_path / "costs.csv"
    row = "2,10,10,10,100,1,4"
    costs.write_text("\n".join([",".join(["batch", *COLUMNS]), row, row]))
    options = (f"costs={costs}", "ranks=2", "batch=4", "jobs=1")
    command = [
        *(EXPERIMENTS / "plan.py", *options, "measure_links=true", "device=cpu"),
        f"hydra.run.dir={tmp_path / 'plan'}",
    ]
    out = run_ranks(2, command, cwd=tmp_path, env=dict(os.environ))
    assert "links as measured" in out
    assert out.count("written to") == 2  # the links, and the plan of one process
    choice = f"--config-dir={tmp_path / 'plan'}", "hardware=measured"
    sizes = f"costs={costs}", "batch=2", "stages=2", "microbatches=2"
    assert "links as measured" in succeeded(
        "simulate", tmp_path / "simulate", *choice, *sizes, "schedule=one_f_one_b"
    )
    refused("plan", *options, "measure_links=true", match="one process")


def test_plan(tmp_path):
    pilot = "data=digits", "pilot=true", "pilot_seconds=1"
    out = succeeded(
        "plan", tmp_path, "model=resnet6", *pilot, "ranks=2", "batch=4", "jobs=1"
    )
    result = json.loads((tmp_path / "result.json").read_text())
    found = result["metrics"]
    assert_figures(tmp_path, "plan")
    simulated = rows(tmp_path / "candidates.csv")
    assert {row["options"] for row in found} < {row["options"] for row in simulated}
    command = out[out.index("try it by: torchrun") :].splitlines()[0]
    assert "model=resnet6 hardware=ethernet_10 data=digits" in command
    measured = result["pilot"]
    assert (
        out.index(command)
        < out.index(measured["verdict"])
        < out.index("step in one process")
    )
    assert next(iter(measured["rules"])) == "DP"
    assert measured["command"] in out
    assert "model=resnet6 hardware=ethernet_10 data=digits" in measured["command"]
    assert "optimizer=nesterov" in measured["command"]


@thorough
def test_plan_chooses_among_widths(tmp_path):
    gpt = ("model=gpt", "model.layers=1", "model.width=16", "shape=[8]", "classes=32")
    options = ("ranks=2", "batch=2", "widths=[1,2]", "hardware=machines_of_8", "jobs=1")
    out = succeeded("plan", tmp_path, *gpt, *options)
    simulated = rows(tmp_path / "candidates.csv")
    assert {row["width"] for row in simulated} == {"1", "2"}
    for row in simulated:
        assert int(row["devices"]) == int(row["ranks"]) * int(row["width"]) <= 2
    listed = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert ("1 x 2" in out) == any(row["width"] == 2 for row in listed)


@thorough
def test_plan_searches_for_orders(tmp_path):
    search = "search=true", "search_seconds=1", "jobs=1"
    given = "model=resnet6", *SMALL[1:3], "ranks=2", "batch=2", *search
    succeeded("plan", tmp_path, *given)
    simulated = rows(tmp_path / "candidates.csv")
    (mine,) = (row for row in simulated if row["schedule"].startswith("searched"))
    pipelines = [row for row in simulated if "schedule=one_f_one_b" in row["options"]]
    assert float(mine["seconds"]) <= min(float(row["seconds"]) for row in pipelines) * (
        1 + 1e-9
    )
    file = tmp_path / "rank_orders.csv"
    assert (
        build_schedule(settings("train", f"schedule.file={file}").schedule).n_ranks == 2
    )


@thorough
def test_simulate_warns_of_different_sizes(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    options = (f"schedule.file={tmp_path / 'mine.csv'}", "+schedule@also.dp=dp")
    out = succeeded("simulate", tmp_path / "a", *SMALL, *options)
    assert "(mine 2 and 2, DP 4 and 8)" in out
    hint = ("stages=2", "microbatches=2")
    assert " ".join(hint) in out
    assert "note:" not in succeeded("simulate", tmp_path / "b", *SMALL, *options, *hint)
    refused("simulate", *SMALL, options[0], *hint, match="^microbatches=2 stages=2: ")


def test_simulate_reads_fresh_weights_in_a_file_without_delay(tmp_path):
    file = tmp_path / "my_schedule.csv"
    file.write_text("1F0,0F1,1B0,0B1\n1F1,1B1\n2F1,2B1\n0F0,2F0,2I0,2W0,0B0\n")
    for given, delay in (([], 0), (["schedule.delay=1"], 1)):
        schedule = build_schedule(
            settings("simulate", f"schedule.file={file}", *given).schedule
        )
        assert {late for stage in schedule.staleness for late in stage} == {delay}
    succeeded("simulate", tmp_path, *SMALL, f"schedule.file={file}")
    assert rows(tmp_path / "simulation.csv")[0]["schedule"] == "my_schedule"


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("0F0,0X1\n", "row 1, column 2: '0X1'"),
        ("0F0,0B0\n1F0\n", "stage 1 of micro-batch 0"),
        ("0B0,0F0\n", "0B0 for 0F0"),
    ],
)
def test_simulate_refuses_a_broken_file(text, pattern, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text(text)
    refused("simulate", *SMALL, f"schedule.file={file}", match=pattern)


REFUSES = r"""
memory workers=[0] | workers .* got \[0\]
memory extra_time=-1 workers=[2] stages=2 | extra_time .* got -1
memory workers=four | workers .* got four
memory shape=[3,8] | shape .* got \[3, 8\]
memory shape=[] | shape .* got \[\]
memory shape=[0] | shape .* got \[0\]
memory shape=[8] | model=resnet8 .* length, vocabulary
memory model=gpt | model=gpt .* image_size, in_channels
memory classes=0 | classes .* got 0
memory hydra.run.dir=/proc/nowhere | /proc/nowhere
memory axis=time | axis 'time'
memory precision=int8 | precision 'int8'
memory hardware.flops_in_16_bits=0 | hardware.flops_in_16_bits .* got 0
memory hardware=h100 | hardware=h100 .* h200_nvlink
memory hardware.flops=-1 | hardware.flops .* got -1
memory model.target=no_such.thing | no_such.thing
memory model.target=my_package.broken | my_package.broken gives a int
memory model.target=my_package.mine +model.arguments.wide=1 | my_package.mine .* 'wide'
communication workers=1 | got 1$
situations workers=[1] | workers .* got 1
situations ratios=[0] | ratios above 0: got .*\[0.0\]
situations accuracies=runs | accuracies=runs needs .* compressions=
situations accuracies=runs compressions=[none] | result.json cannot be read
pipelines ranks=0 | ranks .* got 0
pipelines microbatches=[] | microbatches .* got \[\]
pipelines microbatches=[8,0] | microbatches .* got \[8, 0\]
pipelines microbatches=-1 | microbatches .* got -1
pipelines rank=4 | option rank: .* ranks
plan ranks=[0] | ranks .* got \[0\]
plan ranks=3 batch=64 | batch=64 .* ranks=3
plan pilot=true | pilot=true .* data=digits
plan data=digits classes=3 | classes .* data
plan widths=[2] ranks=1 | widths=2 .* ranks=1
plan widths=[0] | widths .* got \[0\]
plan widths=[3] ranks=6 batch=6 hardware=machines_of_8 | width=3 .* 8
plan model=gpt model.heads=1 model.width=16 widths=[2] | width=2 .*heads, 1
plan pilot=true data=digits widths=[1,2] | pilot=true .* widths=\[1, 2\]
plan memory=16GB/s | memory .* 16GB/s
plan memory=32 | memory=32GiB
plan staleness=-1 | staleness .* got -1
plan model.target=my_package.broken | my_package.broken gives a int
simulate schedule.file=nowhere.csv | nowhere.csv
simulate schedule=interleaved_1f1b stages=5 schedule.n_ranks=2 | 5 stages .* 2 ranks
simulate schedule=zb_v stages=3 | 3 stages
simulate schedule=v_half stages=3 | 3 stages
simulate schedule=v_min stages=3 | 3 stages
simulate stages=2 checkpoint=[2] | stage 2 in checkpoint
simulate +schedule@also.schedule=dp stages=2 workers=2 | also.schedule
simulate optimizer_words=-1 | optimizer_words .* got -1
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(REFUSES))
def test_refuses(own, tmp_path, arguments, pattern):
    name, *options = arguments
    small = SMALL if name in ("memory", "simulate") else ()
    refused(name, *small, f"hydra.run.dir={tmp_path}", *options, match=pattern)

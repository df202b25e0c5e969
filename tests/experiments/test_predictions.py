"""memory, communication, pipelines and simulate end to end: what they say, write and refuse."""

import json

import pytest
import torch

from tests.experiments.command import refused, run
from tests.experiments.test_results import assert_figures, rows
from toolkit.cost import memory_curve
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


def test_memory(tmp_path):
    finished = run("memory", *SMALL, "workers=[2,4]", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert_figures(tmp_path, "memory")
    found = rows(tmp_path / "memory.csv")
    assert {(row["axis"], row["workers"]) for row in found} == {
        (axis, n) for axis in ("roofline", "flops", "bytes") for n in "24"
    }
    for row in found:
        assert 0 < float(row["reduction"]) <= float(row["largest_reduction"]) + 1e-9
    provenance = json.loads((tmp_path / "result.json").read_text())["provenance"]
    assert provenance["device"] == "meta tensors"


def test_memory_measured_on_the_device(tmp_path):
    finished = run(
        "memory", *SMALL, "axis=measured", "device=cpu", "workers=[2]", f"hydra.run.dir={tmp_path}"
    )
    assert finished.status == 0, finished.err
    assert "measured" in finished.out


def test_memory_in_16_bits(tmp_path):
    arguments = ("precision=bf16", "workers=[2]", f"hydra.run.dir={tmp_path}")
    assert "resnet8 in bf16: one micro-batch" in run("memory", *SMALL, *arguments).out
    example = torch.empty(4, 3, 16, 16, device="meta")
    full, cast = (
        memory_curve(build("resnet8", 10, 16), example, "flops", precision=precision).peak
        for precision in ("fp32", "bf16")
    )
    assert float(rows(tmp_path / "memory.csv")[0]["peak_bytes_together"]) == 2 * cast < 2 * full


def test_memory_of_one_number_of_workers(tmp_path):
    finished = run("memory", *SMALL, "workers=2", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert {row["workers"] for row in rows(tmp_path / "memory.csv")} == {"2"}


def test_memory_of_the_users_own_model(own, tmp_path):
    arguments = ("shape=[3,8,8]", "batch=2", "workers=[2]", f"hydra.run.dir={tmp_path}")
    finished = run("memory", f"model.target={own}", "+model.arguments.width=2", *arguments)
    assert finished.status == 0, finished.err
    assert f"{own} in fp32: one micro-batch of 2 keeps" in finished.out


@pytest.mark.parametrize("experiment", ["memory", "simulate"])
def test_a_decoder_is_analysed_in_its_usual_length(experiment, tmp_path):
    """Its activations: 1024 tokens of each layer, and attention's as one kernel keeps it."""
    small = ("model=gpt", "model.layers=2", "model.width=8", "batch=1", "workers=2")
    finished = run(experiment, *small, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert "gpt" in finished.out
    if experiment == "memory":
        kept = float(rows(tmp_path / "memory.csv")[0]["peak_bytes_together"]) / 2
        assert 10 < kept / (1024 * 8 * 4) < 2 * 30 + 10  # by the numbers of one layer's output


@pytest.mark.parametrize("experiment", ["memory", "simulate"])
def test_a_model_that_does_not_take_the_shape_is_told_in_a_sentence(experiment, own):
    told = refused(experiment, f"model.target={own}", "shape=[16]", "batch=2", "workers=2")
    assert "Sequential cannot train on an example of shape [2, 16]: " in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["workers=[0]"], "workers is a list of whole numbers above 0: got [0]"),
        (["workers=four"], "workers is a list of whole numbers above 0: got"),
        (["workers=null"], "workers is a list of whole numbers above 0: got [None]"),
        (["workers=[true]"], "workers is a list of whole numbers above 0: got [True]"),
        (["shape=[3,8]"], "or the tokens of a sequence, such as [1024]: got [3, 8]"),
        (["shape=[0]"], "or the tokens of a sequence, such as [1024]: got [0]"),
        (["shape=[8]"], "model=resnet8 takes no sequences, for it has no length, vocabulary"),
        (["model=gpt"], "model=gpt takes no images, for it has no image_size, in_channels"),
        (["classes=0"], "classes is 1 or more: got 0"),
        (["hydra.run.dir=/proc/nowhere"], "/proc/nowhere: "),
        (["axis=time"], "unknown axis 'time': choose one of roofline, flops, bytes, measured"),
        (["precision=int8"], "unknown precision 'int8': choose one of fp32, tf32, bf16, fp16"),
        (["hardware.flops_in_16_bits=0"], "hardware.flops_in_16_bits is a positive number"),
        (["hardware=h100"], "hardware=h100 is unknown: did you mean"),
        (["hardware.flops=-1"], "hardware.flops is a positive number: got -1.0"),
        (["model.target=no_such.thing"], "model.target=no_such.thing cannot be imported"),
        (["model.target=my_package.broken"], "gives a int: expected a torch.nn.Module"),
        (
            ["model.target=my_package.mine", "+model.arguments.wide=1"],
            "its arguments are model.arguments",
        ),
    ],
)
def test_memory_refuses(own, arguments, expected):
    assert expected in refused("memory", *SMALL, *arguments)


def test_communication(tmp_path):
    finished = run("communication", "workers=3", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert "every formula equals its count" in finished.out
    found = rows(tmp_path / "communication.csv")
    assert len(found) == 15
    shared = [row for row in found if row["setting"] == "with model parallelism"]
    assert [float(row["ranks"]) for row in shared] == [9, 6, 6]


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


def test_communication_refuses_one_worker():
    assert "a whole number, 2 or more: got 1" in refused("communication", "workers=1")


def test_pipelines(tmp_path):
    arguments = ("ranks=2", "microbatches=[2,5,2]", f"hydra.run.dir={tmp_path}")
    finished = run("pipelines", *arguments)
    assert finished.status == 0, finished.err
    assert_figures(tmp_path, "pipelines")
    found = rows(tmp_path / "pipelines.csv")
    assert [row["microbatches"] for row in found] == ["2"] * 10 + ["5"] * 7
    (gpipe,) = (r for r in found if (r["method"], r["microbatches"]) == ("GPipe", "5"))
    assert (float(gpipe["activations"]), float(gpipe["idle"])) == pytest.approx((2.5, 1 / 6))
    assert gpipe["flush"] == "True"
    why = "CDP gives each rank the same number of micro-batches: got 5 for 2 ranks"
    assert f"5 micro-batches, without CDP-v2: {why}" in finished.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["provenance"]["command"].startswith("python experiments/pipelines.py ranks=2")
    assert [missing["method"] for missing in result["left_out"]] == [
        "interleaved 1F1B",
        "CDP-v1",
        "CDP-v2",
    ]


def test_pipelines_of_one_number_of_microbatches(tmp_path):
    finished = run("pipelines", "ranks=1", "microbatches=2", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert {row["idle"] for row in rows(tmp_path / "pipelines.csv")} == {"0.0"}


def test_help_of_pipelines():
    finished = run("pipelines", "--help", "ranks=4")
    assert finished.status == 0
    assert {"ranks=4", "microbatches=[8,16,32]"} <= set(finished.out.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ranks=0"], "ranks is 1 or more: got 0"),
        (["ranks=two"], "ranks=two: ranks is a whole number"),
        (["microbatches=[]"], "microbatches is a list of whole numbers above 0: got []"),
        (["microbatches=[8,0]"], "microbatches is a list of whole numbers above 0: got [8, 0]"),
        (["microbatches=-1"], "microbatches is a list of whole numbers above 0: got [-1]"),
        (["rank=4"], "there is no option rank: did you mean ranks?"),
        (["microbatch=8"], "there is no option microbatch: did you mean microbatches?"),
    ],
)
def test_pipelines_refuses(arguments, expected, tmp_path):
    assert expected in refused("pipelines", *arguments, f"hydra.run.dir={tmp_path}")


@pytest.mark.parametrize(
    "schedule", ["gpipe", "one_f_one_b", "zero_bubble", "v_half", "pipedream_2bw", "zero_cdp_v2"]
)
def test_simulate(schedule, tmp_path):
    arguments = (f"schedule={schedule}", "stages=2", "microbatches=4", f"hydra.run.dir={tmp_path}")
    finished = run("simulate", *SMALL, *arguments)
    assert finished.status == 0, finished.err
    assert_figures(tmp_path, "timeline")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"M", "X", "C"}
    assert float(rows(tmp_path / "simulation.csv")[0]["samples/s"]) > 0


def test_simulate_with_measured_stages(tmp_path):
    """They are timed once: a schedule beside itself is told apart, and is no faster."""
    arguments = ("measured=true", "device=cpu", "stages=2", "microbatches=2", "steps=2")
    also = ("schedule=gpipe", "+schedule@also.again=gpipe")
    finished = run("simulate", *SMALL, *arguments, *also, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert "stages timed on" in finished.out
    first, again = rows(tmp_path / "simulation.csv")
    assert (first.pop("schedule"), again.pop("schedule")) == ("GPipe (schedule)", "GPipe (again)")
    assert first == again


def test_simulate_counts_the_state_of_the_optimizer(tmp_path):
    def fullest(words):
        folder = tmp_path / str(words)
        arguments = ("schedule=cdp_v2", f"optimizer_words={words}", f"hydra.run.dir={folder}")
        assert run("simulate", *SMALL, *arguments).status == 0
        return float(rows(folder / "simulation.csv")[0]["GiB, fullest rank"])

    assert fullest(0) < fullest(200)


def test_simulate_stages_that_compute_their_forward_twice(tmp_path):
    def predicted(checkpoint, folder):
        arguments = (f"checkpoint={checkpoint}", "schedule=dp", "schedule.placement=one")
        assert run("simulate", *SMALL, *arguments, f"hydra.run.dir={folder}").status == 0
        (row,) = json.loads((folder / "result.json").read_text())["metrics"]
        return row["GiB, fullest rank"], row["ms a step"]

    kept, again = predicted("none", tmp_path / "kept"), predicted("[0,1]", tmp_path / "again")
    assert kept[0] > again[0]
    assert kept[1] < again[1]


def test_simulate_refuses_to_recompute_stages_that_there_are_not():
    message = refused("simulate", *SMALL, "stages=2", "checkpoint=[2]")
    assert "unknown stage 2 in checkpoint: choose from 0 to 1" in message


def test_simulate_side_by_side(tmp_path):
    also = ("schedule=dp", "+schedule@also.cyclic=cdp_v2", "stages=2", "microbatches=2")
    finished = run("simulate", *SMALL, *also, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert [row["schedule"] for row in rows(tmp_path / "simulation.csv")] == ["DP", "CDP-v2"]
    ranks = rows(tmp_path / "ranks.csv")
    assert [(row["schedule"], row["rank"]) for row in ranks] == [
        (name, str(rank)) for name in ("DP", "CDP-v2") for rank in range(2)
    ]


def test_simulate_tells_of_sizes_that_differ_and_how_they_would_not(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    options = (f"schedule.file={tmp_path / 'mine.csv'}", "+schedule@also.dp=dp")
    told = run("simulate", *SMALL, *options, f"hydra.run.dir={tmp_path / 'a'}").out
    assert "differ in their stages and micro-batches (mine 2 and 2, DP 4 and 8)" in told
    hint = ("stages=2", "microbatches=2")
    assert " ".join(hint) in told
    finished = run("simulate", *SMALL, *options, *hint, f"hydra.run.dir={tmp_path / 'b'}")
    assert finished.status == 0, finished.err
    assert "note:" not in finished.out
    assert "has its own stages" in refused("simulate", *SMALL, options[0], *hint)


def test_simulate_refuses_the_name_of_the_first():
    message = refused("simulate", *SMALL, "+schedule@also.schedule=dp", "stages=2", "workers=2")
    assert "also.schedule is the name of the first schedule: choose another" in message


def test_simulate_the_users_own_schedule(tmp_path):
    file = tmp_path / "my_schedule.csv"
    file.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1,\n")
    finished = run("simulate", *SMALL, f"schedule.file={file}", f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    assert rows(tmp_path / "simulation.csv")[0]["schedule"] == "my_schedule"


@pytest.mark.parametrize(
    ("told", "delay"), [((), 0), (("schedule.delay=1",), 1), (("schedule=cdp_v2",), "freshest")]
)
def test_a_file_reads_fresh_weights_unless_told(tmp_path, told, delay):
    """Whatever the delay of the method that is usual."""
    file = tmp_path / "my_schedule.csv"
    file.write_text("1F0,0F1,1B0,0B1\n1F1,1B1\n2F1,2B1\n0F0,2F0,2I0,2W0,0B0\n")
    options = *SMALL, f"schedule.file={file}", *told, f"hydra.run.dir={tmp_path}"
    assert run("simulate", *options).status == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["provenance"]["config"]["schedule"]["delay"] == delay


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0,0X1\n", "row 1, column 2: '0X1' is not an op"),
        ("0F0,0B0\n1F0\n", "stage 1 of micro-batch 0 needs a forward and either a backward"),
        ("0B0,0F0\n", "the orders cannot be carried out: rank 0 waits at 0B0 for 0F0"),
    ],
)
def test_simulate_refuses_a_broken_file(text, expected, tmp_path):
    file = tmp_path / "broken.csv"
    file.write_text(text)
    assert expected in refused("simulate", *SMALL, f"schedule.file={file}")


def test_simulate_refuses_a_missing_file():
    assert "nowhere.csv cannot be read" in refused("simulate", "schedule.file=nowhere.csv")


def test_simulate_refuses_uneven_interleaving():
    arguments = ("schedule=interleaved_1f1b", "stages=5", "schedule.n_ranks=2")
    assert "5 stages cannot be dealt out evenly to 2 ranks" in refused(
        "simulate", *SMALL, *arguments
    )


@pytest.mark.parametrize("schedule", ["zb_v", "v_half", "v_min"])
def test_simulate_refuses_half_a_v(schedule):
    found = refused("simulate", *SMALL, f"schedule={schedule}", "stages=3")
    assert "make 3 stages even" in found

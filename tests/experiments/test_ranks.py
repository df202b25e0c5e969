"""Experiments on many processes: the same results, from one of them; one report of a mistake."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hydra.errors import MissingConfigException

from tests.experiments.command import EXPERIMENTS, TINY, cases, refused, run
from tests.thorough import thorough
from tests.warm_python import run_ranks
from toolkit.cli.explain import explain
from toolkit.cli.process import report_mistake
from toolkit.model import build
from toolkit.runtime import launch
from toolkit.runtime.meters import predicted_vs_measured
from toolkit.runtime.process_group.watch import EXIT_FAILED
from toolkit.runtime.rank_pool import shared

pytestmark = pytest.mark.usefixtures("analysed_once")

OPTIONS = (*TINY, "workers=2", "stages=2", "schedule=cdp_v2", "seed=3")


def torchrun(folder, *arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    command += [str(EXPERIMENTS / "train.py"), *OPTIONS, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def on_ranks(folder, *arguments, n_processes=2):
    """What two ranks print that train."""
    command = [EXPERIMENTS / "train.py", *OPTIONS, *arguments]
    return run_ranks(n_processes, command, cwd=folder, env=dict(os.environ))


def result(folder):
    (found,) = folder.rglob("result.json")
    return json.loads(found.read_text())


def test_devices_share_the_weights_of_a_resnet(tmp_path):
    """The results of one process, and about half of the weights that each stage of it has."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    together.mkdir()
    assert run("train", *OPTIONS, f"hydra.run.dir={alone}").status == 0
    options = ("runtime=distributed", "runtime.width=2", "runtime.record=2")
    on_ranks(together, *options, n_processes=4)
    expected, found = result(alone), result(together)
    for one in (expected, found):
        del one["metrics"]["samples_per_second"]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    model = build("resnet8", 10, image_size=8)
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())
    # Each rank has a version of every stage or two.
    for row in found["ranks"]:
        assert 0.5 < row["peak_weights"] / model_bytes < 1.1


@thorough
def test_the_same_results_as_in_one_process_and_a_resume(tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    together.mkdir()
    assert run("train", *OPTIONS, f"hydra.run.dir={alone}").status == 0
    printed = on_ranks(together, "runtime=distributed", "runtime.record=2")
    assert [path.name for path in together.iterdir()] == ["outputs"]
    expected, found = result(alone), result(together)
    for one in (expected, found):
        del one["metrics"]["samples_per_second"]
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)
    assert [row["rank"] for row in found["ranks"]] == [0, 1]
    assert all(
        row["bytes_sent"] > 0 and row["peak_activations"] > 0 for row in found["ranks"]
    )
    assert all(
        row["peak_activations"] == row["predicted_activations"]
        for row in found["ranks"]
    )
    names = {path.name for path in together.rglob("*.*")}
    assert {"ranks.csv", "spans.csv", "trace.json", "timeline.png"} <= names
    assert "measured in the first 2 training steps" in printed
    (folder,) = (together / "outputs" / "train").iterdir()
    on_ranks(together, f"resume={folder}", "epochs=2")
    assert result(together)["metrics"]["epoch"] == 1


def test_a_controller_gives_the_same_results_and_checkpoints(tmp_path):
    alone, driven, options = (
        tmp_path / "alone",
        tmp_path / "driven",
        (*OPTIONS, "lr=constant"),
    )
    assert run("train", *options, "epochs=2", f"hydra.run.dir={alone}").status == 0
    given = (
        "runtime=controller",
        "runtime.record=2",
        "runtime.keep_every=3",
        "device=cpu",
    )
    assert run("train", *options, *given, f"hydra.run.dir={driven}").status == 0
    shared(1).close()  # which ends the ranks
    rows = result(driven)["ranks"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert all(row["peak_activations"] == row["predicted_activations"] for row in rows)
    resumed = run("train", f"resume={driven}", "epochs=2", "runtime=single_process")
    assert resumed.status == 0, resumed.err
    expected, found = result(alone)["metrics"], result(driven)["metrics"]
    for metrics in (expected, found):
        del metrics["samples_per_second"]
    assert found == pytest.approx(expected, rel=1e-4)


@thorough
def test_mistake_is_reported_once_and_ends_all_ranks(tmp_path):
    finished = torchrun(tmp_path, "runtime=distributed", "partition=halves")
    assert finished.returncode != 0
    (error,) = [
        line for line in finished.stderr.splitlines() if line.startswith("error: ")
    ]
    assert "'halves'" in error


def place(monkeypatch, rank="0", size="2"):
    variables = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "RANK": rank,
        "WORLD_SIZE": size,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def rank(monkeypatch):
    """The environment of rank 0 of 2."""
    place(monkeypatch)


SCHEDULES = {
    "distributed": "cdp_v2",
    "ddp": "dp",
    "fsdp": "dp",
    "delayed_allreduce": "cdp_v1",
    "diloco": "dp",
    "local_sgd": "dp",
    "torch_pipelining": "gpipe",
    "deepspeed": "zero_dp",
    "horovod": "dp",
}


@pytest.mark.parametrize("runtime", SCHEDULES)
def test_refuses_to_run_alone(monkeypatch, runtime):
    # All are installed.
    monkeypatch.setattr("toolkit.extras.find_spec", lambda module: module)
    options = f"schedule={SCHEDULES[runtime]}", f"runtime={runtime}", "workers=3"
    message = refused(
        "train", *TINY, *options, match="RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
    )
    assert message.count("torchrun --nproc-per-node ") == 1
    assert message.endswith(f"runtime={runtime} workers=3")


REFUSES = r"""
runtime=distributed workers=3 | 3 ranks and 2 .* --nproc-per-node 3
runtime=distributed workers=2 schedule.placement=per_stage_and_microbatch | 6 ranks and 2
runtime=single_process workers=2 | runtime=single_process
runtime=distributed workers=2 runtime.timeout=0 | timeout .* got 0
runtime=ddp schedule=dp runtime.backend=mpi | backend 'mpi'
runtime=ddp schedule=dp workers=2 device=cuda:1 | device=cuda:1
runtime=ddp workers=2 runtime.bucket=3 | option runtime.bucket
runtime=ddp workers=2 | runtime=ddp
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(REFUSES))
def test_refuses_before_it_meets_the_others(rank, arguments, pattern):
    refused("train", *TINY, *arguments, match=pattern)


def test_other_ranks_print_nothing(rank, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    options = ("runtime=distributed", "workers=2", "runtime.timeout=0")
    assert run("train", *TINY, *options) == (2, "", "")


@pytest.mark.parametrize(
    ("number", "printed"), [("0", "error: a mistake\n"), ("1", "")]
)
def test_ranks_that_have_met_end_together(rank, monkeypatch, capsys, number, printed):
    given_up = []
    world = SimpleNamespace(watch=SimpleNamespace(fail=given_up.append))
    monkeypatch.setenv("RANK", number)
    monkeypatch.setattr(
        "toolkit.runtime.process_group.join.current_world", lambda: world
    )
    report_mistake("a mistake")
    assert given_up == ["a mistake"]
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize(
    ("rank", "size", "pattern"),
    [
        ("one", "2", "'one'"),
        ("0", "two", "'two'"),
        ("5", "2", "RANK=5 .* WORLD_SIZE=2"),
    ],
)
def test_refuses_an_impossible_rank(monkeypatch, rank, size, pattern):
    place(monkeypatch, rank, size)
    refused("train", *TINY, "runtime=distributed", "workers=2", match=pattern)


def test_ends_if_the_other_ranks_do_not_come(rank, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    options = ("runtime=distributed", "workers=2", "runtime.timeout=0.5", "device=cpu")
    finished = run("train", *TINY, *options)
    assert finished.status == EXIT_FAILED
    assert re.search("rank 1 .*127.0.0.1:1 .*0.5 s", finished.err)
    assert "Traceback" not in finished.err


def test_refuses_slurm_without_its_commands():
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    options = ("runtime=distributed", "hydra/launcher=slurm")
    refused("train", "-m", *TINY, *options, match="hydra/launcher=slurm .* srun")


def test_submitit_may_be_missing():
    error = MissingConfigException("", missing_cfg_file="hydra/launcher/submitit_slurm")
    message = explain(error, "train")
    assert "pip install hydra-submitit-launcher" in message


@pytest.fixture(scope="module")
def measured():
    """Every setting of the paper under every rule, N = 2, on 4 processes."""
    return launch(predicted_vs_measured.measure, predicted_vs_measured.n_ranks(2), 2)[0]


def measuring(monkeypatch, folder, rows):
    """Run the experiment; its processes return ``rows``."""
    monkeypatch.setattr("toolkit.runtime.launch", lambda *arguments, **options: [rows])
    return run("communication", "workers=2", "measured=true", f"hydra.run.dir={folder}")


def test_measures_what_was_counted(measured, monkeypatch, tmp_path):
    finished = measuring(monkeypatch, tmp_path, measured)
    assert finished.status == 0, finished.err
    assert "every formula equals its count, and its measurement" in finished.out
    rows = json.loads((tmp_path / "result.json").read_text())["metrics"]
    assert len(rows) == 15
    for row in rows:
        measured = {
            n.removesuffix("_measured"): v for n, v in row.items() if "_measured" in n
        }
        assert measured == {name: row[name] for name in measured}
        assert {"ranks", "activations", "weights", "traffic_in_slot"} < measured.keys()
    assert {"timeline.png", "trace.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("rule", "change", "names"),
    [
        (
            "CDP-v2",
            lambda event: {"bytes": event.bytes + 4},
            {"traffic", "traffic_in_slot"},
        ),
        (
            "CDP-v1",
            lambda event: {"activations": event.activations + 4},
            {"activations"},
        ),
        ("DP", lambda event: {"weights": 2 * event.weights}, {"weights"}),
    ],
)
def test_fails_where_a_measurement_differs(
    measured, monkeypatch, tmp_path, rule, change, names
):
    """A few bytes more in every event of one rank."""
    rows = [*measured]
    place = next(
        k for k, r in enumerate(rows) if (r.setting, r.rule) == ("multi-device", rule)
    )
    found = rows[place].measurements
    wrong = [event._replace(**change(event)) for event in found.records[0].events]
    records = [replace(found.records[0], events=wrong), *found.records[1:]]
    tampered = replace(found, records=records)
    rows[place] = predicted_vs_measured.make_row(
        "multi-device", rule, tampered, 256, 64
    )
    assert names <= rows[place].differences.keys()
    finished = measuring(monkeypatch, tmp_path, rows)
    assert finished.status == 1
    assert all(f"multi-device, {rule}: {name} is " in finished.err for name in names)

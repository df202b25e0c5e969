"""Every training run is in W&B, offline; no run depends on it."""

import json
import os
import signal
import sys

import pytest

from tests.experiments.command import TINY, run, succeeded
from tests.results.fake_wandb import wait_for_offline_run
from toolkit.results import Tracker, provenance, tracker

KEY = "0123456789abcdef" * 2 + "fakefake"
_NAMED = "rule", "schedule_label", "schedule_family"
TRACKED = *TINY, "tracking.mode=offline", "tracking.every=2"


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(tracker, "_reported", set())


def files_with(folder, text):
    paths = [path for path in folder.rglob("*") if path.is_file()]
    assert paths
    return [path for path in paths if text.encode() in path.read_bytes()]


def test_resumed_run_continues_its_wandb_run(tmp_path, wandb_runs):
    arguments = *TRACKED, "diagnostics=2", "tracking.checkpoints=true"
    out = succeeded("train", tmp_path, *arguments)
    (begun,) = wandb_runs
    assert (
        f"tracked offline: wandb sync {tmp_path}/wandb/offline-run-*-{begun.id}*\n"
        in out
    )
    assert begun.config["model"]["name"] == "resnet8"
    assert begun.config["provenance"]["command"].startswith("cyclic-dp train model=")
    assert [*begun.points("train/loss")] == [*begun.points("train/lr")] == [2, 4]
    assert begun.points("delay/cosine_stage_3").keys() == {1, 3}
    result = json.loads((tmp_path / "result.json").read_text())
    assert begun.tags == [result["schedule"], "resnet8", "synthetic"]
    assert begun.points("epoch/top1") == {4: 100 * result["metrics"]["top1"]}
    assert begun.points("epoch") == {4: 1}
    assert begun.summary["final/top1"] == 100 * result["metrics"]["top1"]
    assert begun.summary["state"] == "finished"
    assert {*begun.artifacts} == {"model.pt", "best.ckpt", "step_000000004.ckpt"}
    assert begun.media.keys() == {
        *("schedule/grid", "schedule/activations_by_slot", "schedule/traffic_by_slot")
    }

    succeeded("train", tmp_path, f"resume={tmp_path}", "epochs=2")
    _, resumed = wandb_runs
    assert resumed.id == begun.id
    assert [*resumed.points("train/loss")] == [6, 8]
    assert [*resumed.points("epoch/top1")] == [8]


def test_run_does_not_contain_the_key(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    finished = run("train", *TRACKED, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    wait_for_offline_run(tmp_path, "train/loss")
    assert KEY not in str(finished)
    assert not files_with(tmp_path, KEY)


def test_provenance_does_not_contain_the_key(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr(sys, "argv", ["train.py", f"tracking.name={KEY}"])
    source = provenance({"tracking": {"name": KEY, "tags": [KEY]}}, "a machine", 0)
    assert source["command"].endswith("train.py tracking.name=WANDB_API_KEY")
    assert KEY not in str(source)


def test_runs_of_a_sweep_have_separate_configurations(tmp_path, wandb_runs):
    """The second one fails, and records the reason."""
    folder = tmp_path / "a sweep"
    arguments = "-m", *TRACKED, "optimizer.lr=0.05,1e30"
    assert run("train", *arguments, f"hydra.sweep.dir={folder}").status != 0
    first, second = wandb_runs
    assert first.id != second.id
    assert (first.config["optimizer"]["lr"], second.config["optimizer"]["lr"]) == (
        0.05,
        1e30,
    )
    assert first.group == second.group == "a sweep"
    assert (first.exit_code, first.summary["state"]) == (0, "finished")
    assert second.exit_code == 1
    assert second.summary["state"].startswith("failed: the training loss of epoch 0")
    status = [json.loads((folder / name / "status.json").read_text()) for name in "01"]
    assert [job["diverged"] for job in status] == [False, True]


def test_records_the_signal_that_stops_a_run(tmp_path, monkeypatch, wandb_runs):
    trained = Tracker.step

    def stop(self, step):
        trained(self, step)
        if step.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Tracker, "step", stop)
    finished = run("train", *TRACKED, "epochs=2", f"hydra.run.dir={tmp_path}")
    assert finished.status == 75
    (stopped,) = wandb_runs
    assert (stopped.summary["state"], stopped.exit_code) == ("stopped by SIGTERM", 75)


@pytest.mark.parametrize("option", ["save.keep=0", "guard_factor=1", "profile=-1"])
def test_invalid_options_start_no_wandb_run(tmp_path, option):
    finished = run("train", *TRACKED, option, f"hydra.run.dir={tmp_path}")
    assert finished.status == 2
    assert finished.err.startswith("error: ")
    assert not (tmp_path / "wandb").exists()


def test_comparison_tracks_a_run_for_each_rule_and_seed(tmp_path, wandb_runs):
    arguments = *TRACKED, "seeds=1", "~rules.cdp_v2", f"hydra.run.dir={tmp_path}"
    finished = run("compare", *arguments)
    assert finished.status == 0, finished.err
    *wandb_runs, differences = wandb_runs
    assert (differences.name, differences.group) == ("differences", tmp_path.name)
    expected = {
        f"accuracy/{row['schedule']}": row["accuracy"]
        for row in json.loads((tmp_path / "result.json").read_text())["metrics"]
    }
    expected |= {
        "difference/CDP-v1": expected["accuracy/CDP-v1"] - expected["accuracy/DP"]
    }
    found_differences = {name: differences.summary.get(name) for name in expected}
    assert found_differences == pytest.approx(expected)
    assert {run.name for run in wandb_runs} == {"DP, seed 0", "CDP-v1, seed 0"}
    assert {tuple(run.tags) for run in wandb_runs} == {
        ("dp", "resnet8", "synthetic"),
        ("cdp_v1", "resnet8", "synthetic"),
    }
    found = {tuple(run.config[key] for key in _NAMED) for run in wandb_runs}
    assert found == {("dp", "DP", "data_parallel"), ("cdp_v1", "CDP-v1", "cyclic")}
    assert {run.summary["schedule/peak_activations"] for run in wandb_runs} == {2.5, 4}
    assert wandb_runs[0].defined["epoch/top1"]["summary"] == "max,last"
    for one in wandb_runs:
        assert (one.group, one.job_type) == (tmp_path.name, "compare")
        assert (one.config["seed"], "rules" in one.config) == (0, False)
        assert one.points("epoch/top1").keys() == {4}
        assert one.summary["state"] == "finished"
    assert len({run.config["schedule"]["_target_"] for run in wandb_runs}) == 2
    assert finished.out.count("tracked offline") == 1
    assert f"wandb sync {tmp_path}/wandb/offline-run-*\n" in finished.out


def test_diverged_run_of_a_comparison_is_marked_failed(tmp_path, wandb_runs):
    """As a run of train is, without final metrics."""
    arguments = (
        *TRACKED,
        "seeds=1",
        "~rules.cdp_v1",
        "~rules.cdp_v2",
        "optimizer.lr=1e30",
    )
    assert run("compare", *arguments, f"hydra.run.dir={tmp_path}").status == 0
    (lost,) = wandb_runs
    assert (lost.exit_code, lost.summary["state"]) == (
        1,
        "failed: its loss diverged in epoch 0",
    )
    assert not [name for name in lost.summary if name.startswith("final/")]

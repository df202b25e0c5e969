"""A sweep loses nothing: neither the other runs when one fails, nor earlier work."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from tests.experiments.command import EXPERIMENTS, TINY, refused, run
from tests.thorough import thorough
from tests.training.test_data import write_images
from toolkit.cli.command import command_of_job
from toolkit.cli.resume import resume_arguments
from toolkit.cli.sweeps import (
    Status,
    Sweep,
    mark_failed,
    read_status,
    status_if_finished,
    summary,
    sweep_options,
    with_defaults,
    write_status,
)

pytestmark = pytest.mark.usefixtures("analysed_once")


def test_the_first_failure_is_the_status_of_a_run(tmp_path):
    mark_failed(tmp_path, "rank 1 has died")
    assert read_status(tmp_path) is None
    write_status(tmp_path, Status("running", ["a=1"], objective=0.5))
    for rank in (1, 2):
        mark_failed(tmp_path, f"rank {rank} has died")
    assert read_status(tmp_path) == Status("failed", ["a=1"], "rank 1 has died", 0.5)
    (tmp_path / "status.json").write_text('{"state": ')
    assert read_status(tmp_path) is None


def test_optuna_has_defaults():
    asked = ["-m", "hydra/sweeper=optuna", "hydra.sweeper.direction=minimize"]
    rest = ["hydra.sweeper.max_failure_rate=1.0", "hydra.sweeper.sampler.seed=0"]
    assert with_defaults(asked) == [*asked, *rest]
    grid = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid"]
    assert with_defaults(grid) == [*grid, "hydra.sweeper.direction=maximize", rest[0]]
    assert with_defaults(["-m", "seed=0,1"]) == ["-m", "seed=0,1"]


def test_a_resumed_sweep_keeps_its_options(tmp_path, monkeypatch):
    options = [
        "-m",
        "seed=0,1",
        "hydra.sweep.dir=x",
        "resume=y",
        "hydra/launcher=joblib",
    ]
    (tmp_path / "sweep.json").write_text(json.dumps({"options": options}))
    kept = ["-m", "seed=0,1", "hydra/launcher=joblib", f"hydra.sweep.dir={tmp_path}"]
    assert resume_arguments([f"resume={tmp_path}"], "train") == kept
    assert resume_arguments(["--multirun", f"resume={tmp_path}"], "train") == kept
    assert resume_arguments([f"resume={tmp_path}", "seed=0,1"], "train") == kept
    with pytest.raises(
        ValueError, match=r"its own options: leave out epochs=9 seed=3$"
    ):
        resume_arguments(["-m", "epochs=9", f"resume={tmp_path}", "seed=3"], "train")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"under torchrun only single runs"):
        resume_arguments([f"resume={tmp_path}"], "train")


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"options": 1}'])
def test_no_sweep(tmp_path, content):
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    assert sweep_options(tmp_path) is None


def test_only_finished_runs_are_skipped(tmp_path):
    assert status_if_finished(tmp_path, ["a=1"]) is None
    for state in ("running", "failed", "stopped"):
        write_status(tmp_path, Status(state, ["a=1"]))
        assert status_if_finished(tmp_path, ["a=1"]) is None
    write_status(tmp_path, Status("finished", ["a=1"], objective=0.5))
    assert status_if_finished(tmp_path, ["a=1"]).objective == 0.5
    with pytest.raises(
        ValueError, match=r"holds the run of other options \(a=1\): start"
    ):
        status_if_finished(tmp_path, ["a=2"])


def test_the_summary_names_what_has_not_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(Sweep, "folder", tmp_path)
    assert summary("train") == ("", True)
    for name, status in {
        "10": Status("running", ["seed=10"]),
        "2": Status("failed", ["seed=2"], "no"),
        "1": Status("finished", ["seed=1"]),
    }.items():
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, status)
    text, complete = summary("train")
    assert not complete
    assert text.splitlines() == [
        "",
        f"3 runs in {tmp_path}: 1 finished, 1 failed, 1 broken off",
        "  failed: 2 (seed=2): no",
        "  broken off: 10 (seed=10)",
        f"to continue: cyclic-dp train -m resume={tmp_path}",
    ]


def test_the_summary_of_finished_runs_has_their_objectives(tmp_path, monkeypatch):
    monkeypatch.setattr(Sweep, "folder", tmp_path)
    for name, seed, top1 in (("1", 3, 0.5), ("0", 2, None)):
        options = ["epochs=1", f"seed={seed}"]
        (tmp_path / name).mkdir()
        write_status(tmp_path / name, Status("finished", options, objective=top1))
    text, complete = summary("train")
    assert complete
    rows = [line.split() for line in text.splitlines()[3:]]
    assert rows[0] == ["run", "seed", "objective"]
    assert rows[2:4] == [["0", "2"], ["1", "3", "0.5"]]
    assert rows[-1] == ["cyclic-dp", "report", f"runs={tmp_path}"]


@pytest.mark.parametrize(
    "name", ["a b", "it's", 'say "x"', "$HOME", "a;b", "x,y", "[1]", "50%&`"]
)
def test_the_commands_of_the_summary_can_be_pasted(tmp_path, monkeypatch, name):
    """A shell splits them into the words meant, and Hydra reads the folder from them."""
    folder = tmp_path / name
    (folder / "0" / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr(Sweep, "folder", folder)
    write_status(folder / "0", Status("stopped", ["seed=1"]))
    text, _ = summary("train")
    label, _, command = text.splitlines()[-1].partition(": ")
    assert label == "to continue"
    assert shlex.split(command)[-2:] == ["-m", f"resume={folder}"]

    write_status(folder / "0", Status("finished", ["seed=1"], objective=0.5))
    text, _ = summary("train")
    report, sync = text.splitlines()[-2:]
    *_, option = shlex.split(report)
    parsed = OverridesParser.create().parse_override(option)
    assert (parsed.key_or_group, parsed.value()) == ("runs", str(folder))
    shown = subprocess.run(
        ["sh", "-c", sync.replace("wandb sync", "echo")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == f"{folder}/0/wandb/offline-run-1\n"


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two runs that finish, and between them one that cannot."""
    folder = tmp_path_factory.mktemp("sweep")
    options = [
        "schedule=dp",
        "optimizer.lr=0.1,-1,0.2",
        "epochs=2",
        f"hydra.sweep.dir={folder}",
    ]
    return folder, run("train", "-m", *TINY, *options)


def test_one_that_fails_does_not_lose_the_others(swept):
    folder, finished = swept
    assert finished.status == 2
    assert "error: optimizer.lr is a number, 0 or more: got -1.0" in finished.err
    assert "Traceback" not in finished.err
    assert f"3 runs in {folder}: 2 finished, 1 failed" in finished.out
    assert f"to continue: cyclic-dp train -m resume={folder}" in finished.out
    states = [read_status(folder / str(k)).state for k in range(3)]
    assert states == ["finished", "failed", "finished"]
    results = [json.loads((folder / k / "result.json").read_text()) for k in "02"]
    assert read_status(folder / "0").objective == results[0]["metrics"]["top1"]
    rates = [found["provenance"]["config"]["optimizer"]["lr"] for found in results]
    assert rates == [0.1, 0.2]
    assert not (folder / "1" / "result.json").exists()


def test_a_resumed_sweep_skips_finished_runs_and_resumes_others(swept):
    """A run that was killed after its first epoch continues from there; no run is repeated."""
    folder, _ = swept
    done = (folder / "0" / "result.json").stat().st_mtime_ns
    broken = folder / "2"
    before = (broken / "epochs.csv").read_text()
    write_status(broken, Status("running", read_status(broken).options))
    for name in ("result.json", "epochs.csv", "model.pt"):
        (broken / name).unlink()
    *_, last = sorted(broken.glob("checkpoints/step_*.ckpt"))
    last.unlink()
    options = sweep_options(folder)
    again = run("train", "-m", f"resume={folder}")
    assert again.status == 2  # the one that cannot still cannot
    assert sweep_options(folder) == options  # so that it can be resumed again
    assert re.findall(r"run (\d) has finished before", again.out) == ["0"]
    assert (folder / "0" / "result.json").stat().st_mtime_ns == done
    texts = before, (broken / "epochs.csv").read_text()
    first, second = (
        [row.split(",")[:4] for row in text.splitlines()] for text in texts
    )
    assert first == second


def test_a_bug_in_one_run_is_written_to_its_folder(tmp_path, monkeypatch):
    from toolkit import training

    def prepare(*_, **__):
        raise AssertionError("impossible")

    monkeypatch.setattr(training, "prepare", prepare)
    finished = run("train", "-m", *TINY, "seed=0,1", f"hydra.sweep.dir={tmp_path}")
    assert finished.status == 1
    assert f"error: run 1 has failed: see {tmp_path}/1/error.txt" in finished.err
    assert "impossible" in (tmp_path / "1" / "error.txt").read_text()
    assert "failed: 0 (" in finished.out
    assert "AssertionError: impossible" in finished.out


def test_a_job_of_a_launcher_has_its_own_command(monkeypatch):
    """submitit's own script runs it on a cluster."""
    hydra = SimpleNamespace(overrides=SimpleNamespace(task=["seed=3", "epochs=2"]))
    monkeypatch.setattr("hydra.core.hydra_config.HydraConfig.get", lambda: hydra)
    own = [str(EXPERIMENTS / "train.py"), "seed=3", "epochs=2"]
    for script, expected in (
        ("/lib/_submit.py", own),
        ("x/train.py", ["x/train.py", "a=1"]),
    ):
        monkeypatch.setattr(sys, "argv", [script, "a=1"])
        assert command_of_job("train") == expected


def test_presets_are_sweeps(tmp_path):
    options = "+sweep=schedules_by_seeds", "seed=0", f"hydra.sweep.dir={tmp_path}"
    finished = run("train", *TINY, *options)
    assert finished.status == 0, finished.err
    assert f"3 runs in {tmp_path}: 3 finished" in finished.out
    options = yaml.safe_load((tmp_path / "1" / ".hydra" / "overrides.yaml").read_text())
    assert {"schedule=cdp_v1", "seed=0"} <= {*options}


def test_mistakes():
    message = refused("train", "+sweep=schedules_by_seed")
    assert message.startswith(
        "sweep=schedules_by_seed is unknown: did you mean schedules_by_seeds"
    )
    assert "+sweep=" in refused("train", "sweep=schedules_by_seeds")


def test_sweeps_that_start_in_the_same_second_do_not_share_a_folder():
    shown = ["--cfg", "hydra", "--package", "hydra.sweep.dir", "--resolve"]
    command = [sys.executable, str(EXPERIMENTS / "train.py"), *shown]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {process.communicate()[0] for process in both}
    assert len(folders) == 2
    assert all("outputs/train/" in folder for folder in folders)


@thorough
def test_joblib_runs_several_at_once_with_their_own_readers(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / split, "ab", n=8)
    data = [
        "data=image_folder",
        f"data.root={tmp_path}",
        "data.image_size=8",
        "data.num_workers=1",
    ]
    several = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "schedule=dp,cdp_v2"]
    sizes = ["model=resnet8", "epochs=1", "batch=2"]
    folder = tmp_path / "sweep"
    finished = run("train", "-m", *data, *several, *sizes, f"hydra.sweep.dir={folder}")
    assert finished.status == 0, finished.err
    assert f"2 runs in {folder}: 2 finished" in finished.out

"""A run in W&B: all that is logged is read back, and nothing that goes wrong there is felt."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import wandb
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from tests.results.wandb_files import found
from toolkit.cli.schema import Tracking
from toolkit.results import Curves, Tracker, session, track, tracker, training_log, wandb_run
from toolkit.results.wandb_offline import complete, payloads
from toolkit.runtime.microbatches import StepResult
from toolkit.training import Epoch, Step


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing has been said or refused before; and the user has no key and no cache."""
    monkeypatch.setattr(tracker, "_said", set())
    monkeypatch.setattr(session, "_refused", [])
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def begin(folder, *, resume=False, alone=True, **options):
    config = OmegaConf.create(
        {"seed": 3, "model": {"name": "resnet8"}, "resume": None}
        | {"tracking": OmegaConf.structured(Tracking(**{"mode": "offline", **options}))}
    )
    return track(
        config, folder, device="a machine", name="a run", resume=resume, alone=alone, group="many"
    )


def test_all_that_is_logged_is_read_back(tmp_path, capsys):
    with begin(tmp_path, tags=["a", "b"], project="p") as tracker:
        assert tracker.on
        for step in (10, 20):
            tracker.log({"train/loss": 1 / step, "train/lr": 0.1}, step)
        tracker.table("a table", [{"x": 1, "y": "one"}, {"x": 2, "y": "two"}])
        tracker.figure("a figure", Figure(figsize=(1, 1)))
        tracker.summary({"final/top1": 0.5})
        (tmp_path / "model.pt").write_text("weights")
        tracker.files("weights", [tmp_path / "model.pt"])
    (run,) = found(tmp_path)
    assert (run.project, run.name, run.group, run.job_type) == ("p", "a run", "many", "train")
    assert run.tags == ["a", "b"]
    assert (run.config["seed"], run.config["model"]) == (3, {"name": "resnet8"})
    assert run.config["provenance"]["device"] == "a machine"
    assert {"command", "commit", "versions"} <= run.config["provenance"].keys()
    assert "tracking" not in run.config
    assert run.points("train/loss") == {10: 0.1, 20: 0.05}
    assert run.points("train/lr") == {10: 0.1, 20: 0.1}
    assert (run.summary["final/top1"], run.summary["state"]) == (0.5, "finished")
    assert run.exit_code == 0
    assert [*run.folder.glob("files/media/images/a figure_*.png")]
    (table,) = run.folder.glob("files/media/table/a table_*.json")
    assert '"data":[[1,"one"],[2,"two"]]' in table.read_text().replace(" ", "")
    assert run.artifacts["model"] == ["model.pt"]
    printed = capsys.readouterr()
    assert printed.out == f"tracked offline: wandb sync {run.folder}\n"
    assert printed.err == ""
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "tracked.jsonl", "wandb"}
    assert "WANDB_CACHE_DIR" not in os.environ


@pytest.mark.parametrize(
    ("error", "state", "status"),
    [
        (FloatingPointError("the loss is nan:\nlower it"), "failed: the loss is nan:", 1),
        (KeyboardInterrupt(), "interrupted", 130),
        (None, "stopped by SIGTERM", 75),
    ],
    ids=str,
)
def test_how_a_run_ended(tmp_path, error, state, status):
    def train(tracker):
        if error is not None:
            raise error
        tracker.end(state, status)

    def tracked():
        with begin(tmp_path) as tracker:
            train(tracker)

    if error is None:
        tracked()
    else:
        with pytest.raises(type(error)):
            tracked()
    (run,) = found(tmp_path)
    assert (run.summary["state"], run.exit_code) == (state, status)


def test_a_resumed_run_is_one_run_with_all_its_points(tmp_path):
    """It was resumed at step 20, and killed once more in the middle of a line."""
    with begin(tmp_path) as tracker:
        for step in (10, 20, 30):
            tracker.log({"train/loss": step}, step)
        tracker.log({"epoch": 0, "epoch/top1": 0.5}, 15)
    (first,) = found(tmp_path)
    with (tmp_path / "tracked.jsonl").open("a") as journal:
        journal.write('{"step": 40, "tra')
    with begin(tmp_path, resume=True) as tracker:
        assert tracker.epochs == {0}
        for step in (30, 40):
            tracker.log({"train/loss": 2 * step}, step)
    (run,) = found(tmp_path)
    assert run.id == first.id
    assert run.folder != first.folder
    logged = [(row["step"], row["train/loss"]) for row in run.history if "train/loss" in row]
    assert logged == [(10, 10), (20, 20), (30, 60), (40, 80)]
    assert run.points("epoch/top1") == {15: 0.5}
    with begin(tmp_path, resume=True):
        pass  # all its steps are done
    (again,) = found(tmp_path)
    assert again.points("train/loss") == run.points("train/loss")


def test_a_run_resumed_online_sends_what_the_server_has_not(tmp_path, monkeypatch):
    """The server is played by offline files. It had come to step 20 when the run was killed."""
    begun = []
    init = wandb.init

    def online(*, mode, resume, **options):
        begun.append((mode, resume, options["id"]))
        run = init(mode="offline", **options)
        if resume:
            run.summary.update({"step": 20})
            monkeypatch.setattr(wandb.Run, "resumed", True)
        return run

    monkeypatch.setattr(wandb, "init", online)
    with begin(tmp_path / "run", mode="online") as tracker:
        for step in (10, 20, 30, 40):
            tracker.log({"train/loss": step}, step)
    (first,) = found(tmp_path / "run")
    first.folder.rename(tmp_path / "server")
    with begin(tmp_path / "run", mode="online", resume=True) as tracker:
        for step in (40, 50):
            tracker.log({"train/loss": step}, step)
    (run,) = found(tmp_path / "run")
    assert [*run.points("train/loss")] == [20, 30, 40, 50]
    assert begun == [("online", None, run.id), ("online", "allow", run.id)]


def test_another_run_in_the_same_folder_is_another(tmp_path):
    for _ in range(2):
        with begin(tmp_path) as tracker:
            tracker.log({"train/loss": 1}, 10)
    first, second = found(tmp_path)
    assert first.id != second.id
    assert second.points("train/loss") == {10: 1}


def test_what_a_killed_start_left_is_let_go(tmp_path):
    """Killed before its journal was begun: nothing can go on with it."""
    killed = tmp_path / "wandb" / "offline-run-20260101_000000-abcdef01"
    killed.mkdir(parents=True)
    (killed / "run-abcdef01.wandb").write_bytes(b"")
    with begin(tmp_path):
        pass
    assert not killed.exists()
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 1


def test_without_the_package_a_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for _ in range(2):
        with begin(tmp_path) as tracker:
            tracker.log({"train/loss": 1}, 10)
        assert tracker.notes == [
            "not tracked: there is no wandb: pip install wandb, or tracking.mode=disabled"
        ]
    assert capsys.readouterr().err == f"warning: {tracker.notes[0]}\n"
    assert not found(tmp_path)


@pytest.mark.parametrize("what", ["init", "log"])
def test_what_fails_in_wandb_is_told_once(tmp_path, monkeypatch, capsys, what):
    def fail(*_, **__):
        raise OSError("No space left")

    monkeypatch.setattr(*((wandb, "init") if what == "init" else (wandb.Run, "log")), fail)
    with begin(tmp_path) as tracker:
        for step in range(1, 4):
            tracker.log({"train/loss": 1}, step)
        tracker.table("a table", [{"x": 1}])
    (note,) = tracker.notes
    assert note.startswith("not tracked")
    assert note.endswith("W&B has failed (No space left)")
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"warning: {note}\n")
    assert [run.exit_code for run in found(tmp_path)] == ([] if what == "init" else [0])


def lose_its_process(folder):
    with begin(folder / "first") as tracker:
        tracker.log({"train/loss": 1}, 1)
        subprocess.run(["pkill", "-P", str(os.getpid()), "wandb"], check=True)
        for step in range(2, 1000):
            tracker.log({"train/loss": 1}, step)
            if tracker.notes:
                break
            time.sleep(0.01)
    with begin(folder / "second") as tracker:
        tracker.log({"train/loss": 2}, 1)
    assert not tracker.notes


def test_the_end_of_its_own_process_ends_one_run_alone(tmp_path):
    """As by a signal to all processes of a job."""
    program = (
        "import sys, pathlib; from tests.results.test_tracker import lose_its_process;"
        "lose_its_process(pathlib.Path(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    fresh = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    finished = subprocess.run(command, capture_output=True, text=True, env=fresh)
    assert finished.returncode == 0, finished.stderr
    (warning,) = finished.stderr.splitlines()
    assert warning.startswith("warning: not tracked to the end: W&B has failed (")
    assert finished.stdout.startswith(f"tracked offline: wandb sync {tmp_path}/second/")
    assert [run.exit_code for run in found(tmp_path / "second")] == [0]


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path, capsys):
    (tmp_path / "wandb").write_text("")
    with begin(tmp_path) as tracker:
        tracker.log({"train/loss": 1}, 10)
    assert "not tracked: W&B has failed ([Errno 17] File exists:" in capsys.readouterr().err


def test_what_was_cut_off_is_told(tmp_path, monkeypatch, capsys):
    """As on a full disk, which W&B's own process does not tell of."""
    finish = wandb.Run.finish

    def cut(self, *arguments, **options):
        finish(self, *arguments, **options)
        (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        assert complete(path.parent)
        path.write_bytes(path.read_bytes()[:-20])
        assert [*payloads(path)]

    monkeypatch.setattr(wandb.Run, "finish", cut)
    monkeypatch.setattr(wandb_run, "complete", lambda place: complete(place, within=0.1))
    with begin(tmp_path) as tracker:
        tracker.log({"train/loss": 1}, 10)
    (note,) = tracker.notes
    assert "could not be written to its end" in note
    assert capsys.readouterr().out == ""
    assert not complete(tmp_path, within=0)


def test_online_without_a_key_tells_how_to_log_in(tmp_path, capsys):
    for folder in (tmp_path / "0", tmp_path / "1"):
        with begin(folder, mode="online") as tracker:
            tracker.log({"train/loss": 1}, 10)
        (run,) = found(folder)
        assert run.points("train/loss") == {10: 1}
        assert not [*folder.glob("wandb/run-*")]
        assert tracker.notes == [
            "W&B has no key: log in with `wandb login`; the run is kept offline"
        ]
    assert capsys.readouterr().err == f"warning: {tracker.notes[0]}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"mode": "ofline"}, "one of offline, online, disabled: got 'ofline'"), ({"every": 0}, "0")],
)
def test_options_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ValueError, match=message), begin(tmp_path, **options):
        pass


@pytest.mark.parametrize(
    ("asked", "mode"),
    [("", "offline"), ("dryrun", "offline"), ("online", "online"), ("disabled", "disabled")],
)
def test_the_environment_gives_the_mode(monkeypatch, asked, mode):
    monkeypatch.setenv("WANDB_MODE", asked)
    assert Tracking().mode == mode


class Log(Tracker):
    """Keeps what is logged."""

    on = True

    def __init__(self):
        super().__init__()
        self.points = []

    def log(self, values, step):
        self.points.append({"step": step, **values})


def test_losses_are_read_at_logged_steps_only():
    class Losses:
        def __init__(self, step):
            self.step = step

        def __len__(self):
            return 2

        def mean(self):
            read.append(self.step)
            return torch.tensor(float(self.step))

    read = []
    log = Log()
    curves = Curves(log, every=3)
    for k in range(8):
        result = StepResult(k, (0, 1), Losses(k + 1), torch.empty(0))
        curves.trained(Step(k + 1, 8, result, 0.1, 4))
    assert read == [3, 6]
    assert [point["train/loss"] for point in log.points] == [3, 6]
    assert all(point["train/samples_per_second"] > 0 for point in log.points)


def test_the_speed_of_a_resumed_run_is_from_its_first_step_on(monkeypatch):
    """What a process did before its first step, in mid-epoch, is not the time of a step."""
    times = iter([1000.0, 1000.5, 1001.0, 1001.5])
    monkeypatch.setattr(training_log, "time", SimpleNamespace(monotonic=lambda: next(times)))
    log = Log()
    curves = Curves(log, every=4)
    for k in range(24, 28):  # the fifth to the eighth step of the third epoch
        result = StepResult(k, (0,), torch.ones(1), torch.empty(0))
        curves.trained(Step(k - 19, 10, result, 0.1, 8))
    assert [point["train/samples_per_second"] for point in log.points] == [16.0]


def test_the_speed_is_of_the_steps_since_the_point_before(monkeypatch):
    times = iter([0.0, 1.0, 1.5, 2.0])
    monkeypatch.setattr(training_log, "time", SimpleNamespace(monotonic=lambda: next(times)))
    log = Log()
    curves = Curves(log, every=2)
    for k in range(4):
        result = StepResult(k, (0,), torch.ones(1), torch.empty(0))
        curves.trained(Step(k + 1, 4, result, 0.1, 8))
    assert [point["train/samples_per_second"] for point in log.points] == [8.0, 16.0]


def test_epochs_from_before_the_tracking_are_logged_at_the_end():
    log = Log()
    log.epochs = {1}
    curves = Curves(log, every=100)
    curves.trained(Step(4, 4, SimpleNamespace(step=11, losses=torch.ones(1), delays=()), 0.1, 4))
    epochs = [Epoch(k, 1.0, 2.0, 0.5, 0.9, 0.1, 100.0) for k in range(2)]
    curves.whole(epochs)
    assert [(point["epoch"], point["step"]) for point in log.points] == [(0, 4)]
    assert "epoch/ema_top1" not in log.points[0]

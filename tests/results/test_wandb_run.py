"""Runs in W&B: what is logged arrives, and no failure there ends a run."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch
import wandb
from matplotlib.figure import Figure

from tests.results.fake_wandb import wait_for_offline_run
from toolkit.errors import UserError
from toolkit.options import TrackingOptions
from toolkit.results import track, tracker, wandb_run
from toolkit.runtime.microbatches import StepResult
from toolkit.training import Epoch, Step


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """No note was printed before; the user has no key."""
    monkeypatch.setattr(tracker, "_reported", set())
    monkeypatch.setenv("NETRC", str(tmp_path / "no_netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)


def begin(folder, *, resume=False, own=None, **options):
    tracking = {"mode": "offline", **options}
    config = {
        "seed": 3,
        "model": {"name": "resnet8"},
        "resume": None,
        "tracking": tracking,
    }
    job_type = "compare" if own else "train"
    run_labels = wandb_run.RunLabels("a run", "many", ("b", "", "c" * 70), job_type)
    return track(
        config, folder, run_labels, device="a machine", resume=resume, run_folder=own
    )


def log_everything(folder):
    with begin(folder, tags=["a", "b"], project="p") as tracker:
        for step in (10, 20):
            tracker.log({"train/loss": 1 / step, "train/lr": 0.1}, step)
        rows = [{"x": 1, "y": "one"}, {"x": 2, "y": "two"}]
        tracker.log({"a table": rows, "a figure": Figure(figsize=(1, 1))})
        tracker.summary({"final/top1": 0.5})
        (folder / "model.pt").write_text("weights")
        tracker.files("weights", [folder / "model.pt"])
    return tracker


def test_everything_logged_arrives(tmp_path, wandb_runs):
    log_everything(tmp_path)
    (run,) = wandb_runs
    assert (run.project, run.name, run.group, run.job_type) == (
        "p",
        "a run",
        "many",
        "train",
    )
    assert (run.mode, run.tags) == ("offline", ["a", "b", "c" * 64])
    source = run.config.pop("provenance")
    assert run.config == {"seed": 3, "model": {"name": "resnet8"}}
    assert source["device"] == "a machine"
    assert {"command", "commit", "versions"} <= source.keys()
    assert run.history == [
        {"step": step, "train/loss": 1 / step, "train/lr": 0.1} for step in (10, 20)
    ]
    assert run.summary == {"final/top1": 0.5, "state": "finished"}
    assert run.media["a table"].data == [[1, "one"], [2, "two"]]
    assert run.artifacts == ["model.pt"]
    assert run.exit_code == 0


def test_an_offline_run_is_on_disk(tmp_path, capfd):
    tracker = log_everything(tmp_path)
    (run,) = tmp_path.glob("wandb/offline-run-*")
    identity = wandb_run.read_identity(tmp_path / "wandb_run.json")
    assert identity == {"id": run.name.rpartition("-")[2], "group": "many"}
    assert tracker.where == (
        f"tracked offline: wandb sync {tmp_path}/wandb/offline-run-*-{identity['id']}*"
    )
    assert [*run.glob("files/media/images/a figure_*.png")]
    (table,) = run.glob("files/media/table/a table_*.json")
    assert '"data":[[1,"one"],[2,"two"]]' in table.read_text().replace(" ", "")
    wait_for_offline_run(tmp_path, "train/loss", "final/top1", "model.pt")
    assert capfd.readouterr() == ("", "")
    assert {path.name for path in tmp_path.iterdir()} == {
        "model.pt",
        "wandb_run.json",
        "wandb",
    }
    assert not {"WANDB_CACHE_DIR", "WANDB_DATA_DIR"} & os.environ.keys()
    # `wandb sync` joins the folders of one id.
    with begin(tmp_path, resume=True) as again:
        again.log({"train/loss": 1}, 30)
    assert again.where == tracker.where
    assert len([*tmp_path.glob(f"wandb/offline-run-*-{identity['id']}*")]) == 2


@pytest.mark.parametrize(
    ("error", "state", "status"),
    [
        (
            FloatingPointError("the loss is nan:\nlower it"),
            "failed: the loss is nan:",
            1,
        ),
        (KeyboardInterrupt(), "interrupted", 130),
    ],
    ids=str,
)
def test_how_a_run_ended(tmp_path, wandb_runs, error, state, status):
    with pytest.raises(type(error)), begin(tmp_path):
        raise error
    with begin(tmp_path) as tracker:
        tracker.end("stopped by SIGTERM", 75)
        tracker.end(state, status)
    assert [(run.summary["state"], run.exit_code) for run in wandb_runs] == [
        (state, status),
        ("stopped by SIGTERM", 75),  # the first counts
    ]


@pytest.mark.parametrize("own", [None, "under_way"])
def test_a_resumed_run_keeps_its_id_unless_it_is_damaged(tmp_path, wandb_runs, own):
    own = own and tmp_path / own
    if own:
        own.mkdir()
    identity = (own or tmp_path) / "wandb_run.json"
    for resume, content in (
        (False, None),
        (True, None),
        (False, None),
        (True, '{"id"'),
    ):
        if content:
            identity.write_text(content)
        with begin(tmp_path, own=own, resume=resume) as tracker:
            assert not tracker.notes
    first, resumed, another, renewed = wandb_runs
    assert resumed.id == first.id
    assert len({run.id for run in wandb_runs}) == 3
    assert {run.resume for run in wandb_runs} == {"allow"}
    assert wandb_run.read_identity(identity)["id"] == renewed.id != another.id


def fail(*_, **__):
    raise OSError("No space left")


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("package", "pip install wandb"),
        ("folder", "File exists"),
        ("init", "(No space left)"),
        ("log", "(No space left)"),
        ("key", "`wandb login`"),
    ],
)
def test_a_failure_is_reported_once(tmp_path, monkeypatch, capsys, what, expected):
    """By two runs, which both continue."""
    if what == "package":
        monkeypatch.setitem(sys.modules, "wandb", None)
    elif what == "folder":
        (tmp_path / "wandb").write_text("")
    elif what == "key":
        wandb.teardown()  # which remembers the keys of earlier tests
    else:
        monkeypatch.setattr(
            *((wandb, "init") if what == "init" else (wandb.Run, "log")), fail
        )
    for _ in range(2):
        with begin(tmp_path, mode="online" if what == "key" else "offline") as tracker:
            for step in range(1, 4):
                tracker.log({"train/loss": 1}, step)
            tracker.log({"a table": [{"x": 1}]})
        (note,) = tracker.notes
        assert tracker.where == ""
    assert note.startswith("not tracked")
    assert expected in note
    assert capsys.readouterr().err == f"warning: {note}\n"


def test_a_run_online_has_an_address(tmp_path, wandb_runs):
    with begin(tmp_path, mode="online") as tracker:
        pass
    (run,) = wandb_runs
    assert (run.mode, tracker.where) == ("online", f"tracked online: {run.url}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "ofline"}, "tracking.mode 'ofline'"),
        ({"every": 0}, "tracking.every .*got 0"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message):
    with pytest.raises(UserError, match=message), begin(tmp_path, **options):
        pass


@pytest.mark.parametrize(
    ("asked", "mode"),
    [
        ("", "offline"),
        ("dryrun", "offline"),
        ("online", "online"),
        ("disabled", "disabled"),
    ],
)
def test_the_environment_gives_the_mode(monkeypatch, asked, mode):
    monkeypatch.setenv("WANDB_MODE", asked)
    assert TrackingOptions().mode == mode


def test_losses_are_read_at_logged_steps_only(tmp_path, wandb_runs):
    class Losses(list):
        def mean(self):
            read.append(self[0])
            return torch.tensor(float(self[0]))

    read = []
    with begin(tmp_path, every=3) as tracker:
        for k in range(8):
            result = StepResult(k, (0, 1), Losses([k + 1, k + 1]), torch.empty(0))
            tracker.step(Step(k + 1, 8, result, 0.1, 4))
    assert read == [3, 6]
    (run,) = wandb_runs
    assert run.points("train/loss") == {3: 3, 6: 6}
    assert run.points("train/lr") == {3: 0.1, 6: 0.1}


def test_an_epoch_is_logged_at_its_last_step(tmp_path, wandb_runs):
    with begin(tmp_path, every=100) as tracker:
        result = SimpleNamespace(step=11, losses=torch.ones(1), delays=())
        tracker.step(Step(4, 4, result, 0.1, 4))
        tracker.epoch(Epoch(2, 1.0, 2.0, 0.5, 0.9, 0.1, 100.0))
    (point,) = wandb_runs[0].history
    assert (point["epoch"], point["step"], point["epoch/top1"]) == (3, 12, 50)
    assert "epoch/ema_top1" not in point

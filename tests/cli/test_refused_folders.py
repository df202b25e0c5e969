"""A refused command leaves no folder, and an older folder as it was."""

import json
import os
import shlex
import signal

import pytest

from tests.experiments.command import TINY, refused, run
from tests.thorough import more
from toolkit.cli.refused_folders import discard
from toolkit.cli.sweeps import alone_in

pytestmark = pytest.mark.usefixtures("analysed_once")


def test_only_unused_folders_are_removed(tmp_path):
    for name, content in (("refused", "status.json"), ("begun", "epochs.csv")):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / content).touch()
        discard(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


def test_a_folder_that_another_process_uses_stays(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with alone_in(folder):
        discard(folder)
        assert folder.is_dir()
    discard(folder)
    assert not folder.exists()


REFUSED = r"""
train sed=1
train schedule=cdp_v3
train optimizer.lr=-1
train optimizer.lr=fast
train schedule.delay=0
train +optimizer.foo=1
train runtime._target_=nowhere.Here
train batch=1000000000000
train data=imagenet
train 'switch.candidates=[{schedule: dp, nope: 1}]'
train 'schedule.phases=[{schedule: dp, epochs: 1, nope: 1}]'
train hydra.run.dir=runs/mine optimizer.lr=-1
train -m optimizer.lr=-1,-2
train -m seed=1,abc
train -m seed=0,1 optimizer.lr=-1 hydra.sweep.dir=sweep
train -m optimizer.lr=-1,-2 +optimizer.foo=1
compare seeds=0
compare precision=0
compare rules.dp.placement=foo
memory shape=[a]
memory extra_time=-1 model=resnet8 shape=[3,8,8] workers=[2]
memory extra_time=0.1 stages=500 model=resnet8 shape=[3,8,8] workers=[2]
plan search=true search_seconds=nan
plan jobs=0
plan pilot=true pilot_seconds=-1 data=digits
pipelines ranks=1000000
situations ratios=[-1]
situations workers=[1]
report runs=nowhere
bench bench=peak device=cpu
"""


LINES = REFUSED.strip().splitlines()


@pytest.mark.parametrize("line", more(LINES[::3], LINES))
def test_a_refused_command_leaves_no_folder(tmp_path, monkeypatch, line):
    monkeypatch.chdir(tmp_path)
    name, *options = shlex.split(line)
    given = {option.partition("=")[0] for option in options}
    if name == "train":
        options += [option for option in TINY if option.partition("=")[0] not in given]
    finished = run(name, *options)
    assert finished.status == 2
    assert "Traceback" not in finished.err
    assert "to continue" not in finished.out
    assert [*tmp_path.rglob("*")] == []


def test_an_older_folder_is_as_it_was(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    refused("train", *TINY, "optimizer.lr=-1", f"hydra.run.dir={tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_sweep_with_runs_that_began_keeps_the_others_reasons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    finished = run("train", "-m", *TINY, "schedule=dp", "optimizer.lr=0.1,-1")
    assert finished.status == 2
    (reason,) = tmp_path.glob("outputs/train/*/1/status.json")
    assert "optimizer.lr" in json.loads(reason.read_text())["message"]


def test_a_full_disk_while_the_options_are_written(tmp_path):
    folder = tmp_path / "run"
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").symlink_to("/dev/full")
    message = refused("train", *TINY, f"hydra.run.dir={folder}")
    assert "No space left on device" in message


def test_an_interrupted_run_says_that_nothing_is_saved(monkeypatch, tmp_path):
    """Also where an import turns the interrupt into an error of its own."""

    def import_again(_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    monkeypatch.setattr("toolkit.training.profiling.check_profile", import_again)
    finished = run("train", *TINY, f"hydra.run.dir={tmp_path}")
    assert finished.status == 130
    assert "Traceback" not in finished.err
    assert "interrupted; nothing is saved" in finished.err
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], "nothing is saved" in status["message"]) == (
        "stopped",
        True,
    )


def test_an_interrupt_before_the_options_are_read(monkeypatch, tmp_path):
    def end_process():
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("toolkit.cli.schema.register", end_process)
    finished = run("train", *TINY)
    assert finished.status == 130
    assert "Traceback" not in finished.err
    assert not any(tmp_path.iterdir())

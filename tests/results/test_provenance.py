import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from toolkit.results import describe, provenance
from toolkit.results.provenance import starter

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 3, "betas": (0.9, 0.999), "save": {"keep": 2}}


def command_of(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", list(argv))
    return provenance(CONFIG, "a machine", 1.5)["command"]


@pytest.mark.parametrize(
    ("folder", "script"),
    [
        (ROOT, "experiments/train.py"),
        (ROOT / "experiments", "train.py"),
        (ROOT / "notebooks", "../experiments/train.py"),
        (Path("/"), str(ROOT / "experiments/train.py")),
    ],
)
def test_the_command_is_relative_to_the_project(monkeypatch, folder, script):
    monkeypatch.chdir(folder if folder.is_dir() else ROOT / "experiments")
    command = command_of(monkeypatch, script, "seed=3", "partition=[a, b]")
    assert command == "python experiments/train.py seed=3 'partition=[a, b]'"
    assert shlex.split(command)[-1] == "partition=[a, b]"


def test_a_script_elsewhere_goes_by_its_name(monkeypatch, tmp_path):
    command = command_of(monkeypatch, str(tmp_path / "mine.py"))
    assert command == "python mine.py"


def test_what_a_reader_needs():
    found = provenance(CONFIG, "a machine", 1.23456)
    assert found["config"] == {"seed": 3, "betas": [0.9, 0.999], "save": {"keep": 2}}
    assert (found["seed"], found["device"], found["seconds"]) == (3, "a machine", 1.235)
    assert found["versions"]["torch"] == version("torch")
    assert found["versions"]["cdp-toolkit"] == version("cdp-toolkit")
    assert found["started"].endswith("+00:00")


def git_of(top, status):
    told = {"HEAD": "0123abcd", "--show-toplevel": top, "--porcelain": status}

    def git(command, **_):
        return subprocess.CompletedProcess(command, 0, stdout=f"{told[command[2]]}\n")

    return git


@pytest.mark.parametrize(("status", "mark"), [("", ""), (" M toolkit/files.py", "+")])
def test_the_commit_is_marked_where_the_code_has_changed(monkeypatch, status, mark):
    monkeypatch.setattr(subprocess, "run", git_of(ROOT, status))
    assert provenance(CONFIG, "a machine", 1)["commit"] == f"0123abcd{mark}"


def test_the_commit_of_a_repository_around_it_is_not_that_of_the_code(monkeypatch):
    monkeypatch.setattr(subprocess, "run", git_of(ROOT.parent, ""))
    assert provenance(CONFIG, "a machine", 1)["commit"] is None


def test_no_commit_outside_git(monkeypatch):
    def no_git(*_, **__):
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(subprocess, "run", no_git)
    assert provenance(CONFIG, "a machine", 1)["commit"] is None


def test_the_processor_and_its_threads():
    assert describe(torch.device("cpu")).endswith(f", {torch.get_num_threads()} threads")


def test_torchrun_on_machines(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert starter() == ["torchrun", "--nnodes", "2", "--nproc-per-node", "4"]

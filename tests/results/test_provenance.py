import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from toolkit.results import describe, provenance
from toolkit.results.provenance import commit, resume_command

ROOT = Path(__file__).parents[2]
CONFIG = {"seed": 3, "betas": (0.9, 0.999), "save": {"keep": 2}}


@pytest.mark.parametrize(
    ("folder", "script", "shown"),
    [
        (ROOT, "experiments/train.py", "cyclic-dp train"),
        (ROOT / "experiments", "train.py", "cyclic-dp train"),
        (ROOT / "notebooks", "../experiments/train.py", "cyclic-dp train"),
        (Path("/"), str(ROOT / "experiments/train.py"), "cyclic-dp train"),
        (Path("/"), "elsewhere/mine.py", "python mine.py"),
    ],
)
def test_the_command_is_the_same_in_any_folder(monkeypatch, folder, script, shown):
    monkeypatch.chdir(folder if folder.is_dir() else ROOT / "experiments")
    monkeypatch.setattr(sys, "argv", [script, "seed=3", "partition=[a, b]"])
    command = provenance(CONFIG, "a machine", 1.5)["command"]
    assert command == f"{shown} seed=3 'partition=[a, b]'"


def test_what_a_reader_needs():
    found = provenance(CONFIG, "a machine", 1.23456)
    assert found["config"] == {"seed": 3, "betas": [0.9, 0.999], "save": {"keep": 2}}
    assert (found["seed"], found["device"], found["seconds"]) == (3, "a machine", 1.235)
    assert (
        found["versions"].items()
        >= {k: version(k) for k in ("torch", "cyclic-dp")}.items()
    )
    assert found["started"].endswith("+00:00")


def test_commit(monkeypatch, tmp_path):
    # The package has a function of this name.
    module = sys.modules["toolkit.results.provenance"]
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "a").write_text("one")
    assert commit() is None
    for words in (
        ["init", "-q"],
        ["add", "a"],
        ["commit", "-qm", "one"],
        ["tag", "v1"],
    ):
        subprocess.run([*git, *words], check=True)
    found = commit()
    assert re.fullmatch("[0-9a-f]{40}", found)
    (tmp_path / "a").write_text("two")
    assert commit() == f"{found}+"
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(module, "ROOT", tmp_path / "inner")
    assert commit() is None  # of a repository around that of the code


def test_the_processor_and_its_threads(monkeypatch):
    assert describe(torch.device("cpu")).endswith(
        f", {torch.get_num_threads()} threads"
    )
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(sys, "argv", [str(ROOT / "experiments/train.py")])
    monkeypatch.chdir(ROOT)
    start = "torchrun --nnodes 2 --nproc-per-node 4 -m toolkit train"
    assert resume_command(Path("a b")) == f"{start} 'resume=a b'"

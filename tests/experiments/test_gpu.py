"""The jobs of a machine with a GPU, in slices."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "experiments" / "gpu.py"

# A comparison of as many seeds as its last option says: the second takes too long at first.
SCRIPT = """
import pathlib, sys, time
folder = pathlib.Path(next(w.split("=")[1] for w in sys.argv if w.startswith(("hydra", "resume"))))
begun = (folder / "runs.yaml").exists()
(folder / "runs.yaml").touch()
if not begun:
    time.sleep(60)
(folder / "result.json").write_text(" ".join(sys.argv[1:]))
"""


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "_folder", (tmp_path / "outputs").joinpath)
    monkeypatch.setattr(module, "_LEAST", 0)
    monkeypatch.setattr(module, "_GRACE", 1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return module


def called(gpu, monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    assert gpu.main() == 0
    return capsys.readouterr().out


def test_a_slice_ends_in_time_and_the_next_goes_on(gpu, monkeypatch, capsys, tmp_path):
    again = "-c", SCRIPT, f"resume={tmp_path / 'outputs' / 'compared'}", "seeds=2"
    bad = gpu.Job("bad", ("-c", "raise SystemExit(3)"))
    many = gpu.Job("compared", ("-c", SCRIPT, "seeds=2"), again)
    monkeypatch.setattr(gpu, "jobs", lambda data: [bad, many])
    first = called(gpu, monkeypatch, capsys, "--minutes=0.08")
    assert "failed with status 3" in first
    assert "call it again" in first
    assert not (tmp_path / "results").exists()
    second = called(gpu, monkeypatch, capsys, "--minutes=0.5")
    assert "call it again" not in second
    kept = tmp_path / "results" / "compared" / "result.json"
    assert kept.read_text() == f"{again[2]} seeds=2"
    assert "ended: -c" in called(gpu, monkeypatch, capsys, "--list")


def test_trainings_need_data_and_grow_by_a_seed(gpu):
    without, everything = [*gpu.jobs(None)], [*gpu.jobs("/data")]
    assert everything[: len(without)] == without
    trained = everything[len(without) :]
    assert [(job.name, job.again[-1]) for job in trained] == [
        *(("cifar10_corrections_24", f"seeds={n}") for n in range(1, 6)),
        *(("cifar10_short", f"seeds={n}") for n in range(1, 11)),
        *(("cifar10_paper", f"seeds={n}") for n in range(1, 4)),
    ]


def test_a_machine_without_gpu_is_refused(gpu, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no GPU" in capsys.readouterr().err

"""python experiments/report.py writes a page, whatever else goes wrong."""

import csv
import math

import pytest

from tests.experiments.command import refused, run
from tests.results import folders

KEY = "0123456789" * 4


@pytest.fixture
def runs(tmp_path):
    folders.train(tmp_path / "runs" / "a")
    folders.train(tmp_path / "runs" / "b", "cdp_v2")
    return tmp_path / "runs"


def test_a_report_is_written(tmp_path, runs):
    out = tmp_path / "out"
    finished = run("report", f"runs=[{runs}/a,{runs}/b*]", "title=Digits", f"hydra.run.dir={out}")
    assert finished.status == 0
    assert f"written to {out / 'report.html'}" in finished.out
    assert "2 runs, 2 finished" in finished.out
    assert "<h1>Digits</h1>" in (out / "report.html").read_text()
    with (out / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["schedule"] for row in rows] == ["DP", "CDP-v2"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "runs is an output folder, a list or a glob of them, such as runs=outputs/train: got"),
        (["runs=[]"], "runs is an output folder, a list or a glob of them"),
        (
            ["runs=nowhere"],
            "nowhere is not a folder: give the output folder of a run, or one above",
        ),
        (["runs=nowhere*"], "runs=nowhere*: no folder is called so"),
        (["runs=conf"], "no runs in conf: looked for result.json, status.json and .hydra/config"),
        (
            ["runs=conf", "publish=wandb", "entity=me"],
            "publish=wandb needs entity=... and project=..., where the runs are",
        ),
        (["runs=conf", "publish=wanbd"], "unknown publish 'wanbd': choose wandb, or leave it out"),
        (["run=conf"], "there is no option run: did you mean runs?"),
    ],
)
def test_it_refuses(tmp_path, arguments, expected):
    assert expected in refused("report", *arguments, f"hydra.run.dir={tmp_path}")


def test_what_cannot_be_published_is_written(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    out = tmp_path / "out"
    given = [f"runs={runs}", "publish=wandb", "entity=me", "project=cdp"]
    message = refused("report", *given, f"hydra.run.dir={out}")
    assert "cannot be reached" in message
    assert KEY not in message
    assert (out / "report.html").exists()


def test_runs_of_a_comparison_that_have_not_finished_are_told_apart(tmp_path):
    folders.compare(tmp_path / "runs", {"dp": [0.9, 0.8], "cdp_v1": [0.7, math.nan]})
    path = tmp_path / "runs" / "runs.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(x.replace(",1.0,nan,", ",nan,nan,") for x in lines) + "\n")
    finished = run("report", f"runs={tmp_path / 'runs'}", f"hydra.run.dir={tmp_path / 'out'}")
    told = f"failed: {tmp_path / 'runs'} (CDP-v1, seed 1): its loss diverged in epoch 0"
    assert told in finished.out

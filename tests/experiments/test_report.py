"""python experiments/report.py writes a page."""

import math

import pytest

from tests.experiments.command import refused, rows, succeeded
from tests.results import folders
from tests.thorough import thorough

KEY = "0123456789" * 4


@pytest.fixture
def runs(tmp_path):
    folders.train(tmp_path / "runs" / "a")
    folders.train(tmp_path / "runs" / "b", "cdp_v2")
    return tmp_path / "runs"


def test_report_is_written(tmp_path, runs):
    out = tmp_path / "out"
    printed = succeeded("report", out, f"runs=[{runs}/a,{runs}/b*]", "title=Digits")
    assert "2 runs, 2 finished" in printed
    assert "<h1>Digits</h1>" in (out / "report.html").read_text()
    assert [row["schedule"] for row in rows(out / "report.csv")] == ["DP", "CDP-v2"]


@thorough
def test_report_is_written_even_if_it_cannot_be_published(tmp_path, runs, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    out = tmp_path / "out"
    options = ("publish=wandb", "entity=me", "project=cdp", f"hydra.run.dir={out}")
    message = refused("report", f"runs={runs}", *options, match="127.0.0.1:9")
    assert KEY not in message
    assert (out / "report.html").exists()


def test_unfinished_runs_of_a_comparison_are_named(tmp_path):
    folders.compare(tmp_path / "runs", {"dp": [0.9, 0.8], "cdp_v1": [0.7, math.nan]})
    path = tmp_path / "runs" / "runs.csv"
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(x.replace(",1.0,nan,", ",nan,nan,") for x in lines) + "\n"
    )
    out = succeeded("report", tmp_path / "out", f"runs={tmp_path / 'runs'}")
    assert f"failed: {tmp_path / 'runs'} (CDP-v1, seed 1): " in out

"""Damaged checkpoints are refused, passed over, or damaged where nothing depends on it."""

import pytest

from tests.experiments.command import EXPERIMENTS, rows, run
from tests.thorough import more, thorough


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    options = [f"bench.mutations={more(11, 22)}", "device=cpu", f"hydra.run.dir={folder}"]
    return run("bench", "bench=checkpoint_fuzz", *options), rows(folder / "mutations.csv")


def test_none_goes_unnoticed(fuzzed):
    finished, rounds = fuzzed
    assert finished.status == 0, finished.err
    damaged = {"bits flipped", "cut", "grown", "zeroed", "noise"}
    for done in rounds:
        wanted = {"previous"} if done["kind"] in damaged else {"refused", "previous"}
        assert done["outcome"] in wanted, done
    assert {done["subject"] for done in rounds} >= {"sgd", "adamw", "sharded"}
    assert all(done["target"] for done in rounds if done["outcome"] == "refused")


@thorough
def test_a_runtime_that_takes_any_state_fails(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    monkeypatch.setattr("toolkit.runtime.state._faults_inside", lambda *a: [])
    options = ["bench.mutations=11", "device=cpu", f"hydra.run.dir={tmp_path}"]
    finished = run("bench", "bench=checkpoint_fuzz", *options)
    assert finished.status == 1
    assert {"silent", "traceback"} & {done["outcome"] for done in rows(tmp_path / "mutations.csv")}

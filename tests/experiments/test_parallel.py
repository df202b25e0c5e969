"""Runs of a comparison that train at the same time: the results, signals and failures of one."""

import os
import signal
import threading
import time

import pytest

from tests.experiments.command import TINY, complete, refused, rows, run
from tests.thorough import thorough
from toolkit.results import parallel_runs

pytestmark = pytest.mark.usefixtures("analysed_once")

DIGITS = (
    *("experiment=digits", "device=cpu", "stability=false", "~rules.cdp_v1"),
    *("batch=64", "epochs=1", "seeds=1", "tune.rates=[0.5,1]", "tune.epochs=1"),
)
TWO_RULES = (
    *TINY,
    "device=cpu",
    "threads=1",
    "~rules.cdp_v1",
    "tracking.mode=disabled",
)


def trained(folder):
    """The epochs of all runs, in their order, without their speed."""
    return [row | {"samples_per_second": ""} for row in rows(folder / "runs.csv")]


@thorough
def test_equals_one_run_after_another(tmp_path):
    """To the bit, with the same learning rates chosen, and each run tracked."""
    one, several = tmp_path / "one", tmp_path / "several"
    expected = complete("compare", one, *DIGITS, "tracking.mode=disabled")
    found = complete("compare", several, *DIGITS, "parallel=2", "tracking.mode=offline")
    assert trained(several) == trained(one)
    assert trained(several / "tuning") == trained(one / "tuning")
    for name in ("metrics", "tuning", "delays", "judged_by"):
        assert found[name] == expected[name]
    (note,) = set(found["notes"]) - set(expected["notes"])
    assert note.startswith("up to 2 runs trained at the same time")
    assert found["provenance"]["config"]["parallel"] == 2
    assert not (several / "under_way").exists()
    # Two runs, and one with their differences.
    assert len([*several.glob("wandb/offline-run-*")]) == 3


def process_ids(monkeypatch):
    """The processes of a comparison that passes a signal on."""
    signalled = []
    pass_on = parallel_runs._signal

    def recorded(processes, running, number):
        signalled.extend(processes.process_ids.values())
        pass_on(processes, running, number)

    monkeypatch.setattr(parallel_runs, "_signal", recorded)
    return signalled


def assert_gone(processes):
    assert len({*processes}) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_signal_saves_all_runs_and_leaves_no_process(tmp_path, monkeypatch):
    """The comparison then continues with any number of processes."""
    whole, folder = tmp_path / "whole", tmp_path / "again"
    options = (*TWO_RULES, "epochs=12", "seeds=2")
    expected = complete("compare", whole, *options)
    signalled = process_ids(monkeypatch)

    def saved_runs():
        """Those with a checkpoint; one run can have two while it replaces the older one."""
        paths = folder.glob("under_way/*/checkpoints/*.ckpt")
        return {path.parent for path in paths}

    def interrupt():
        while len(saved_runs()) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt, daemon=True).start()
    several = (*options, "save.steps=8", "parallel=2")
    finished = run("compare", *several, f"hydra.run.dir={folder}")
    assert finished.status == 75, finished.err
    assert "stopped by SIGTERM" in finished.err
    assert f"cyclic-dp compare resume={folder}" in finished.err
    assert len([*folder.glob("under_way/*/checkpoints")]) == 2
    assert_gone(signalled)

    monkeypatch.undo()
    found = complete("compare", folder, f"resume={folder}", "parallel=3")
    assert found["metrics"] == expected["metrics"]
    resumed = [note for note in found["notes"] if "resumed at step" in note]
    assert len(resumed) == 2
    assert trained(folder) == trained(whole)


def test_a_run_that_diverges_is_a_result(tmp_path):
    found = complete(
        "compare", tmp_path, *TWO_RULES, "seeds=1", "optimizer.lr=1e30", "parallel=2"
    )
    assert [row["diverged"] for row in found["metrics"]] == [1, 1]
    assert {row["train_loss"] for row in trained(tmp_path)} == {"nan"}


BROKEN = """
import os, signal
import torch

class Broken(torch.optim.SGD):
    def step(self):
        if os.environ.get("WORLD_SIZE") != "1":
            raise AssertionError("not in a process of its own")
        {}
"""


@pytest.fixture
def broken_optimizer(tmp_path, monkeypatch):
    """Options of an optimizer whose steps carry out a statement."""

    def options(statement):
        (tmp_path / "broken.py").write_text(BROKEN.format(statement))
        monkeypatch.chdir(tmp_path)
        return (*TWO_RULES, "seeds=1", "optimizer._target_=broken.Broken", "parallel=2")

    return options


def test_a_run_that_fails_ends_the_comparison(tmp_path, monkeypatch, broken_optimizer):
    options = broken_optimizer('raise RuntimeError("this step fails")')
    signalled = process_ids(monkeypatch)
    with pytest.raises(RuntimeError, match="seed 0:\nTraceback") as error:
        run("compare", *options, f"hydra.run.dir={tmp_path}/runs")
    # In the line of code and the message.
    assert str(error.value).count("this step fails") == 2
    assert_gone(signalled)


def test_a_process_that_dies_ends_the_comparison(tmp_path, broken_optimizer):
    options = broken_optimizer("os.kill(os.getpid(), signal.SIGKILL)")
    refused(
        "compare",
        *options,
        f"hydra.run.dir={tmp_path}/runs",
        match="process .* has failed .*signal 9.* with seed 0.*resume=.*smaller parallel",
    )


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["parallel=0"], "parallel is a whole number, 1 or more: got 0"),
        (["parallel=-1"], "parallel is a whole number, 1 or more: got -1"),
        (["parallel=1.5"], "parallel=1.5"),
        (
            ["parallel=2", "runtime=distributed"],
            "parallel=2 .*Distributed; .*single_process",
        ),
        (
            ["parallel=2", "runtime=controller"],
            "parallel=2 .*Controlled.*single_process",
        ),
    ],
)
def test_refuses(tmp_path, options, pattern):
    refused("compare", *TWO_RULES, *options, f"hydra.run.dir={tmp_path}", match=pattern)
    assert not (tmp_path / "runs.csv").exists()

"""Predicted memory of a run, against the tensors that are alive, and how many runs fit."""

import gc
from types import SimpleNamespace

import pytest
import torch

from tests.thorough import more
from toolkit.cli import build_run, settings
from toolkit.errors import UserError
from toolkit.format import GIB
from toolkit.model.peak_memory import LiveMemory
from toolkit.training import run_memory
from toolkit.training.run_memory import (
    PROCESS_BYTES,
    MemoryCheck,
    check_fits,
    predict_peak,
)

SMALL = ("data=synthetic", "data.n_train=256", "data.n_test=16", "batch=8", "epochs=1")


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
@pytest.mark.parametrize("schedule", more(["cdp_v2"], ["dp", "cdp_v2"]))
def test_prediction_is_not_below_what_a_run_holds(order, schedule):
    """And at most twice that, of activations mostly."""
    options = (
        "model=resnet8",
        f"schedule={schedule}",
        f"runtime.order={order}",
        "ema=0.9",
    )
    with LiveMemory() as live:
        run = build_run(settings("train", *SMALL, *options, "device=cpu"))
        gc.collect()
        live.most = live.bytes
        run.run()
    predicted = predict_peak(run)
    assert live.most <= predicted <= 2 * live.most


def test_more_runs_than_fit_are_refused():
    run_bytes = 3 * GIB - PROCESS_BYTES
    check_fits(4, run_bytes, 12 * GIB)
    with pytest.raises(
        UserError, match=r"=5 needs 15.0 GiB .* 3.0 GiB for each .*12.0 GiB"
    ):
        check_fits(5, run_bytes, 12 * GIB)
    with pytest.raises(UserError, match="parallel=4 is the most that fits"):
        check_fits(5, run_bytes, 14.9 * GIB)
    with pytest.raises(UserError, match="leave parallel out"):
        check_fits(2, run_bytes, 5.9 * GIB)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A run whose device counts as a GPU with 10 GiB free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(run_memory, "rollback_schedule", lambda run: None)
    monkeypatch.setattr(run_memory, "SingleProcess", SimpleNamespace)
    return SimpleNamespace(device=torch.device("cuda", 0), runtime=SimpleNamespace())


def test_the_largest_run_counts(monkeypatch, on_a_gpu):
    peaks = iter([GIB, 3 * GIB, 2 * GIB])
    monkeypatch.setattr(run_memory, "predict_peak", lambda run: next(peaks))
    memory = MemoryCheck(3)
    for _ in range(3):
        memory.add(on_a_gpu)
    with pytest.raises(
        UserError, match=r"parallel=3 needs 12.0 GiB .*parallel=2 is the most"
    ):
        memory.notes()


def test_a_model_that_cannot_be_analysed_is_noted(monkeypatch, on_a_gpu):
    def refuse(run):
        raise UserError("no such op")

    monkeypatch.setattr(run_memory, "predict_peak", refuse)
    memory = MemoryCheck(2)
    memory.add(on_a_gpu)
    assert memory.notes() == ["whether 2 runs fit into memory is unknown: no such op"]


def test_memory_of_the_cpu_is_not_checked():
    memory = MemoryCheck(1000)
    memory.add(build_run(settings("train", *SMALL, "model=resnet8", "device=cpu")))
    assert memory.notes() == []

"""Short runs of the benchmarks."""

import pytest
import torch
from torch import nn

from tests.experiments.command import EXPERIMENTS, complete, refused, rows
from tests.thorough import thorough
from toolkit.runtime import StepOptions


def test_bench_grouped(tmp_path):
    small = ("image_size=8", "stages=2", "microbatches=2", "batch=2", "rounds=3", "steps=2")
    more = ("model=resnet8", "precision=bf16", "channels_last=true")
    arguments = ("bench=grouped", *(f"bench.{option}" for option in (*small, *more)))
    result = complete("bench", tmp_path, *arguments)
    methods = [row["method"] for row in result["metrics"]]
    steps = ["plain PyTorch, step", "CDP-v2 grouped, step"]
    assert methods == [*steps, "plain PyTorch, loop", "DP grouped, loop", "CDP-v2 grouped, loop"]
    found = result["metrics"]
    assert found[0]["operations"] < found[1]["operations"] < 3 * found[0]["operations"]
    for k, beside in ((0, 1), (2, 3), (2, 4)):
        plain, grouped = found[k], found[beside]
        assert (plain["ratio_min"], plain["ratio"], plain["ratio_max"]) == (1, 1, 1)
        assert 0 < grouped["ratio_min"] <= grouped["ratio"] <= grouped["ratio_max"]
        for row in (plain, grouped):
            assert row["images/s"] == pytest.approx(4 / row["seconds"], rel=0.01)
    assert [row["method"] for row in rows(tmp_path / "bench.csv")] == methods


def test_bench_tracking(tmp_path):
    sizes = ("image_size=8", "stages=2", "batch=2", "rounds=2", "steps=2", "every=1", "most=1000")
    options = [f"bench.{size}" for size in sizes]
    disabled, offline = complete("bench", tmp_path, "bench=tracking", *options)["metrics"]
    assert (disabled["tracking"], offline["tracking"]) == ("disabled", "offline")
    assert disabled["ratio"] == 1
    assert 0 < offline["ratio_min"] <= offline["ratio"] <= offline["ratio_max"]
    assert not offline["failed"]


def test_bench_peak_refuses_a_cpu():
    refused("bench", "bench=peak", "device=cpu", match="device=cpu")


def test_cuda_graphs_know_where_its_steps_begin(monkeypatch):
    monkeypatch.syspath_prepend(str(EXPERIMENTS))
    from benchmarks.grouped import Plain

    begun = []
    monkeypatch.setattr("torch.compile", lambda model, mode: model)
    monkeypatch.setattr("torch.compiler.cudagraph_mark_step_begin", lambda: begun.append("step"))
    for compile in ("reduce-overhead", "default"):
        plain = Plain(nn.Linear(3, 2), StepOptions(compile=compile), torch.device("cpu"))
        plain.step(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))
    assert begun == ["step"]


SHORT = ("bench.runs=1", "bench.kills=1", "bench.rules=[cdp_v2]", "bench.runtimes=[single_process]")
SMALL = "'model=resnet8','data=synthetic','data.n_train=400','data.image_size=8','batch=4'"


@thorough
def test_a_short_one(tmp_path):
    result = complete(
        "bench", tmp_path, "bench=resume", *SHORT, f"bench.options=[{SMALL}]", "device=cpu"
    )
    (row,) = result["metrics"]
    assert row == {
        "runtime": "single_process",
        "rule": "cdp_v2",
        "runs": 1,
        "kills": 1,
        "bit-identical": 1,
        "failed": 0,
    }

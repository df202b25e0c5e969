"""Short runs of the benchmarks."""

import pytest
import torch
from torch import nn

from tests.experiments.command import complete, refused, rows, run
from tests.thorough import thorough
from tests.training.test_data import write_images
from toolkit.runtime import StepOptions


def options(**values):
    return [f"bench.{name}={value}" for name, value in values.items()]


def test_bench_grouped(tmp_path):
    small = options(image_size=8, stages=2, microbatches=2, batch=2, rounds=3, steps=2)
    given = options(
        model="resnet8", precision="bf16", channels_last="true", norms="fused"
    )
    found = complete("bench", tmp_path, "bench=grouped", *small, *given)["metrics"]
    methods = [row["method"] for row in found]
    names = ["plain PyTorch", "DP grouped", "CDP-v2 grouped"]
    assert methods == [f"{name}, {kind}" for kind in ("step", "loop") for name in names]
    plain, parallel, cyclic = (row["operations"] for row in found[:3])
    assert parallel <= 1.2 * plain
    assert plain < cyclic <= 2.1 * plain
    for plain_row, grouped_row in ((0, 1), (0, 2), (3, 4), (3, 5)):
        plain, grouped = found[plain_row], found[grouped_row]
        assert (plain["ratio_min"], plain["ratio"], plain["ratio_max"]) == (1, 1, 1)
        assert 0 < grouped["ratio_min"] <= grouped["ratio"] <= grouped["ratio_max"]
        for row in (plain, grouped):
            assert row["images/s"] == pytest.approx(4 / row["seconds"], rel=0.01)
    assert [row["method"] for row in rows(tmp_path / "bench.csv")] == methods


def test_bench_widths(tmp_path):
    small = options(
        workers="[2]", widths="[1,2]", layers=2, hidden=16, heads=2, tokens=8, batch=1
    )
    found = complete("bench", tmp_path, "bench=widths", "device=cpu", *small)["metrics"]
    devices = {}
    for row in found:
        devices.setdefault(row["method"], []).append(row["devices"])
    # Of 2 workers with 2 stages: all, without one, and a rank for each stage.
    assert [*devices.values()] == [[4, 8], [3, 6], [2, 4], [2, 4]]
    for one, two in zip(found[::2], found[1::2], strict=True):
        assert (one["width"], two["width"]) == (1, 2)
        assert two["GiB a device"] <= one["GiB a device"]


@thorough
def test_bench_loops(tmp_path):
    small = options(model="resnet8", batch=2, rounds=2, steps=8)
    found = complete("bench", tmp_path, "bench=loops", "device=cpu", *small)["metrics"]
    assert [row["rule"] for row in found] == ["dp", "cdp_v1", "cdp_v2"]
    for row in found:
        assert 0 < row["seconds"] < row["start"]
        assert row["of Distributed's"] > 0 < row["of DDP's"]


def test_bench_loader(tmp_path):
    small = options(image_size=8, stages=2, microbatches=2, batch=4, rounds=2, steps=3)
    given = "device=cpu", *small, *options(model="resnet8", num_workers=1)
    found = complete("bench", tmp_path, "bench=loader", *given)["metrics"]
    models = ["CDP-v2 grouped, step", "plain PyTorch, step"]
    loaders = ["in memory", "folder, 0 workers", "folder, 1 worker"]
    assert [row["method"] for row in found] == [*models, *loaders]
    for row in found:
        assert row["images/s"] == pytest.approx(8 / row["seconds a batch"], rel=0.05)
        for column, model in zip(
            ("of CDP-v2's", "of plain PyTorch's"), found, strict=False
        ):
            ratio = row["images/s"] / model["images/s"]
            assert row[column] == pytest.approx(ratio, rel=0.01, abs=0.001)


def test_bench_loader_reads_a_folder(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / split, "ab", n=8)
    small = options(
        image_size=8, stages=2, microbatches=2, batch=4, rounds=1, num_workers=0
    )
    given = (
        "bench=loader",
        "device=cpu",
        *small,
        *options(model="resnet8", root=tmp_path),
    )
    found = complete("bench", tmp_path / "fits", *given, "bench.steps=2")["metrics"]
    assert [row["method"] for row in found][2:] == ["in memory", "folder, 0 workers"]
    where = f"hydra.run.dir={tmp_path}/refused"
    refused(
        "bench",
        *given,
        "bench.steps=3",
        where,
        match=f"steps=3 .*{tmp_path}.* at most 2",
    )
    wrong = "bench=loader", "device=cpu", where
    refused(
        "bench",
        *wrong,
        "bench.num_workers=-1",
        match="num_workers is 0 or more.*got -1",
    )


@thorough
def test_bench_corrections(tmp_path):
    small = options(image_size=8, stages=2, workers=2, batch=2, rounds=2)
    found = complete("bench", tmp_path, "bench=corrections", *small)["metrics"]
    names = ["none", "extrapolate", "optimizer_step", "compensate"]
    assert [(row["rule"], row["correction"]) for row in found] == [
        *(("CDP-v1", name) for name in names),
        *(("CDP-v2", name) for name in names),
    ]
    held = [row["weights of a rank (models)"] for row in found[:4]]
    assert held == [2.5, 3.5, 3.5, 2.5]
    assert [row["ratio"] for row in found if row["correction"] == "none"] == [1, 1]


def test_cuda_graphs_know_where_its_steps_begin(monkeypatch, benchmark_module):
    begun = []
    monkeypatch.setattr("torch.compile", lambda model, mode: model)
    monkeypatch.setattr(
        "torch.compiler.cudagraph_mark_step_begin", lambda: begun.append("step")
    )
    for compile in ("reduce-overhead", "default"):
        given = nn.Linear(3, 2), StepOptions(compile=compile), torch.device("cpu")
        benchmark_module("training_steps").Plain(*given).step(
            torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
        )
    assert begun == ["step"]


@thorough
def test_bench_one_device(tmp_path):
    small = options(models="[resnet8]", microbatches="[3]", stages=4, extra_time=0.2)
    given = *small, *options(image_size=32, batch=16)
    found = complete("bench", tmp_path, "bench=one_device", "device=cpu", *given)[
        "metrics"
    ]
    assert [row["method"] for row in found] == ["DP", "shifted", "chosen"]
    together, shifted, chosen = (row["measured MB"] for row in found)
    assert chosen < shifted < together
    for row in found:
        assert row["measured / predicted"] == pytest.approx(1, abs=0.01)
    assert [row["computed again"] != "" for row in found] == [False, False, True]


@thorough
def test_bench_unlike(tmp_path):
    small = options(
        ranks=2, stages=3, microbatches=3, sleep=0.02, steps=4, search_seconds=0.5
    )
    command = "bench=unlike", "device=cpu", *small, f"hydra.run.dir={tmp_path}"
    run("bench", *command)  # its status depends on seconds
    found = rows(tmp_path / "bench.csv")
    assert [row["forwards of ranks"] for row in found[1::2]] == ["6 3", "6 3"]
    assert all(
        float(row[f"{what} (s)"]) > 0
        for row in found
        for what in ("predicted", "measured")
    )


@thorough
def test_bench_predictions(tmp_path):
    small = options(
        models="[resnet8]", image_size=8, batch=8, steps=4, configurations=6
    )
    found = complete("bench", tmp_path, "bench=predictions", "device=cpu", *small)[
        "metrics"
    ]
    assert 0 < len(found) <= 6  # a small model has few stages
    for row in found:
        assert row["predicted ms"] > 0 < row["measured ms"]
        assert (
            0.8 * row["predicted MB"] <= row["measured MB"] <= 1.01 * row["at most MB"]
        )
        # What a rank holds of weights that travel depends on when messages arrive.
        if not any(method in row["schedule"] for method in ("DP-", "ZeRO", "WeiPipe")):
            assert row["measured MB"] == pytest.approx(row["predicted MB"], rel=0.02)


@thorough
def test_bench_resume(tmp_path):
    small = "'model=resnet8','data=synthetic','data.n_train=200','data.image_size=8','batch=4'"
    short = options(runs=1, kills=1, rules="[cdp_v2]", runtimes="[single_process]")
    given = *short, f"bench.options=[{small}]", "device=cpu"
    (row,) = complete("bench", tmp_path, "bench=resume", *given)["metrics"]
    done = {"runs": 1, "kills": 1, "bit-identical": 1, "failed": 0}
    assert row == {"runtime": "single_process", "rule": "cdp_v2"} | done


@thorough
def test_bench_architectures(tmp_path):
    pytest.importorskip("transformers")
    short = options(libraries="[transformers]", only="[Bert]", steps=2)
    (row,) = complete("bench", tmp_path, "bench=architectures", "device=cpu", *short)[
        "metrics"
    ]
    assert [*row.values()][:3] == ["transformers", "Bert", "torch.export"]
    assert row["difference"] < 1e-9
    assert row["larger stage"] < 0.6
    assert not row["failed"]


@thorough
def test_bench_controller(tmp_path):
    small = options(batch=2, rounds=2, steps=8, ends=2, kills=3, keep_every=2)
    command = "bench=controller", "device=cpu", *small, f"hydra.run.dir={tmp_path}"
    run("bench", *command)  # its status depends on seconds
    found = rows(tmp_path / "bench.csv")
    assert [int(row["rounds"]) for row in found] == [1, 2, 2, 3, 1, 1]
    assert int(found[3]["steps lost"]) <= 2
    assert [int(row["failed"]) for row in found[4:]] == [0, 0]

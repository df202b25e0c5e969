"""Each experiment end to end, tiny: what it writes, and that it repeats."""

import json
import os
import re
from pathlib import Path

import pytest

from tests.experiments.command import (
    TINY,
    assert_figures,
    complete,
    rows,
    run,
    succeeded,
)
from tests.thorough import more, thorough

pytestmark = pytest.mark.usefixtures("analysed_once")

PROVENANCE = {
    "command",
    "config",
    "commit",
    "versions",
    "device",
    "seed",
    "started",
    "seconds",
}


def assert_provenance(found, name, *arguments):
    assert found.keys() == PROVENANCE
    assert found["command"].startswith(f"cyclic-dp {name} {arguments[0]}")
    assert re.fullmatch(r"[0-9a-f]{40}\+?", found["commit"] or "0" * 40)
    assert {"python", "torch", "torchvision", "hydra-core"} <= found["versions"].keys()
    assert found["device"]
    assert found["seed"] == found["config"]["seed"]
    assert 0 < found["seconds"] < 600
    assert re.match(r"\d{4}-\d\d-\d\dT", found["started"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    return folder, complete("train", folder, *TINY, "epochs=2", "seed=3")


def test_train(trained):
    folder, result = trained
    assert (result["schedule"], result["judged_by"]) == ("CDP-v2", "accuracy")
    assert_provenance(result["provenance"], "train", *TINY)
    assert result["provenance"]["seed"] == 3
    assert result["provenance"]["config"]["model"]["name"] == "resnet8"
    epochs = rows(folder / "epochs.csv")
    assert [row["epoch"] for row in epochs] == ["0", "1"]
    assert {key: float(value) for key, value in epochs[-1].items()} == result["metrics"]
    assert 0 <= result["metrics"]["top1"] <= result["metrics"]["top5"] <= 1


@pytest.mark.parametrize(("batch", "written"), [(4, True), (8, False)])
def test_train_writes_a_profile_after_three_steps(tmp_path, batch, written):
    out = succeeded("train", tmp_path, *TINY, f"batch={batch}", "profile=1")
    path = tmp_path / "profile.json"
    assert path.exists() == written
    assert f"profile: {path}" in out if written else "no profile: " in out
    assert not written or json.loads(path.read_text())["traceEvents"]


def metrics(result):
    return {k: v for k, v in result["metrics"].items() if k != "samples_per_second"}


def test_equal_seeds_give_equal_metrics(trained, tmp_path):
    _, first = trained
    again = complete("train", tmp_path / "again", *TINY, "epochs=2", "seed=3")
    other = complete("train", tmp_path / "other", *TINY, "epochs=2", "seed=4")
    assert metrics(again) == metrics(first)
    assert metrics(other) != metrics(first)


VARIANTS = [
    ["schedule=gradient_accumulation", "optimizer=adamw", "lr=constant"],
    ["schedule=dp", "lr=step", "workers=2", "stages=3", "partition=parameters"],
    ["schedule.placement=per_stage", "partition=[layer1_0,layer2_0,fc]"],
    ["model.width=4", "optimizer=lars", "label_smoothing=0.1", "schedule.n=2"],
    ["data=digits", "epochs=1", "batch=150"],
]


@pytest.mark.parametrize(
    "arguments",
    more(VARIANTS[:2], VARIANTS),
    ids=" ".join,
)
def test_variants_of_training(tmp_path, arguments):
    tiny = [
        a for a in TINY if not (a.startswith("data") and "data=digits" in arguments)
    ]
    complete("train", tmp_path, *tiny, *arguments)


def test_compare(tmp_path):
    """A run of a comparison is the training run of its rule and seed."""
    result = complete("compare", tmp_path, *TINY, "seeds=2", "epochs=2", "seed=5")
    assert_provenance(result["provenance"], "compare", *TINY)
    assert [row["rule"] for row in result["metrics"]] == ["dp", "cdp_v1", "cdp_v2"]
    assert [row["staleness_mean"] for row in result["metrics"]] == [0, 1, 6 / 16]
    assert [row["peak_activations"] for row in result["metrics"]] == [4, 2.5, 2.5]
    assert result["metrics"][0]["difference"] == 0
    runs = rows(tmp_path / "runs.csv")
    assert len(runs) == 3 * 2 * 2
    assert {row["seed"] for row in runs} == {"5", "6"}
    table = rows(tmp_path / "comparison.csv")
    for row, written in zip(result["metrics"], table, strict=True):
        last = [r for r in runs if r["rule"] == row["rule"] and r["epoch"] == "1"]
        assert row["accuracy"] == pytest.approx(
            50 * sum(float(r["top1"]) for r in last)
        )
        assert written == {k: "nan" if v is None else str(v) for k, v in row.items()}
    assert_figures(tmp_path, "accuracy", "schedules")
    single = complete(
        "train", tmp_path / "one", *TINY, "schedule=cdp_v1", "seed=6", "epochs=2"
    )
    (found,) = (
        r for r in runs if (r["rule"], r["seed"], r["epoch"]) == ("cdp_v1", "6", "1")
    )
    assert {key: float(found[key]) for key in metrics(single)} == metrics(single)


@thorough
def test_rules_of_one_name_get_labels(tmp_path):
    more = (
        "+schedule@rules.late=cdp_v1",
        "rules.late.delay=2",
        "+schedule@rules.later=cdp_v1",
    )
    larger = "+schedule@rules.larger=dp", "rules.larger.accumulate=2"
    arguments = (
        *TINY,
        "~rules.cdp_v1",
        "~rules.cdp_v2",
        *more,
        "rules.later.delay=2",
        *larger,
    )
    result = complete("compare", tmp_path, *arguments, "seeds=1")
    (note,) = result["notes"]
    late = "DP 16, CDP delay 2 (late) 16, CDP delay 2 (later) 16"
    assert f"({late}, DP accumulate 2 32)" in note
    assert [row["rule"] for row in result["metrics"]] == [
        "dp",
        "late",
        "later",
        "larger",
    ]


def test_launches_write_to_separate_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run("communication", "workers=2").status == 0
    assert len([*Path("outputs/communication").glob("*/result.json")]) == 2
    assert os.listdir() == ["outputs"]


def test_decoders_are_compared_by_their_loss(tmp_path):
    (tmp_path / "mine.txt").write_bytes(
        b"the quick brown fox jumps over the lazy dog. " * 40
    )
    small = (
        "model=gpt",
        "model.layers=1",
        "model.width=8",
        "model.heads=2",
        "data=text",
    )
    small += (
        f"data.root={tmp_path}",
        "data.length=16",
        "epochs=2",
        "batch=4",
        "workers=2",
    )
    small += ("stages=2", "seeds=2", "optimizer=adamw", "~rules.cdp_v1")
    out = succeeded("compare", tmp_path, *small)
    assert_figures(tmp_path, "loss")
    assert "paired difference from DP" in out
    assert "in nats" in out
    assert "accuracy" not in out
    assert json.loads((tmp_path / "result.json").read_text())["judged_by"] == "loss"
    base, other = rows(tmp_path / "comparison.csv")
    ended = [row for row in rows(tmp_path / "runs.csv") if row["epoch"] == "1"]
    for row in (base, other):
        mine = [run for run in ended if run["rule"] == row["rule"]]
        for name, column, factor in (
            ("loss", "test_loss", 1),
            ("accuracy", "top1", 100),
        ):
            found = sum(factor * float(run[column]) for run in mine) / len(mine)
            assert float(row[name]) == pytest.approx(found)
    assert float(base["loss_difference"]) == 0
    expected = float(other["loss"]) - float(base["loss"])
    assert float(other["loss_difference"]) == pytest.approx(expected)
    assert f"{float(other['loss']):.3f} ± {float(other['loss_sd']):.3f}" in out

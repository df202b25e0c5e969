"""Recipes and delay studies as a user asks for them."""

import re

import pytest

from tests.experiments.command import TINY, complete, refused, rows, run
from tests.thorough import thorough

pytestmark = pytest.mark.usefixtures("analysed_once")


def test_a_recipe(tmp_path):
    recipe = ("precision=bf16", "clip=0.5", "checkpoint=[0,2]", "ema=0.9", "channels_last=true")
    plain = complete("train", tmp_path / "plain", *TINY)
    found = complete("train", tmp_path / "found", *TINY, *recipe)
    assert "ema_top1" not in plain["metrics"]
    assert 0 <= found["metrics"]["ema_top1"] <= 1
    assert found["metrics"]["train_loss"] != plain["metrics"]["train_loss"]
    assert found["delays"] == []


def test_what_the_delay_does(tmp_path):
    """One row a stage and a step looked into, and their means by stage."""
    found = complete("train", tmp_path, *TINY, "schedule=cdp_v1", "epochs=2", "diagnostics=3")
    written = rows(tmp_path / "delays.csv")
    assert [(row["step"], row["stage"]) for row in written] == [
        (step, stage) for step in "036" for stage in "0123"
    ]
    assert [row["stage"] for row in found["delays"]] == [0, 1, 2, 3]
    for row in found["delays"]:
        of_stage = [w for w in written if w["stage"] == str(row["stage"])]
        assert [float(w["delay"]) for w in of_stage] == [0, 1, 1]
        assert row["delay"] == 1  # the first step, in which nothing is late, does not count
        for name in ("cosine", "moved"):
            values = [float(w[name]) for w in of_stage[1:]]
            assert row[name] == pytest.approx(sum(values) / 2)


def test_updates_that_were_left_out_are_told(tmp_path):
    options = ("precision=fp16", "loss_scale=1e30")
    found = complete("train", tmp_path / "train", *TINY, *options)
    assert len(found["notes"]) == 4
    pattern = r"stage 0 left out (\d+) of \1 updates, whose gradients were not finite: lower loss_s"
    assert re.match(pattern, found["notes"][0])
    options += ("seeds=1", "~rules.cdp_v1", "~rules.cdp_v2")
    found = complete("compare", tmp_path / "compare", *TINY, *options)
    assert found["notes"][0].startswith("dp, seed 0: stage 0 left out ")


@thorough
def test_a_resumed_run_keeps_what_was_seen_before(tmp_path):
    options = (*TINY, "schedule=cdp_v1", "diagnostics=2", "lr=constant")
    complete("train", tmp_path, *options, "epochs=1")
    assert [row["epoch"] for row in rows(tmp_path / "epochs.csv")] == ["0"]
    found = complete("train", tmp_path, f"resume={tmp_path}", "epochs=3")
    steps = [row["step"] for row in rows(tmp_path / "delays.csv") if row["stage"] == "0"]
    assert steps == [str(step) for step in range(0, len(steps) * 2, 2)]
    assert len(steps) > 3
    assert found["notes"] == ["resumed at step 4: seconds are of the steps since"]
    again = complete("train", tmp_path, f"resume={tmp_path}")
    assert again["metrics"] == found["metrics"]
    assert again["notes"] == ["resumed at step 12: there was nothing left to train"]


def test_a_result_that_cannot_be_written_is_shown(tmp_path):
    for name in ("result.json", "epochs.csv"):
        (tmp_path / name).mkdir()
    finished = run("train", *TINY, f"hydra.run.dir={tmp_path}")
    assert finished.status == 1
    assert "top1" in finished.out
    for name in ("result.json", "epochs.csv"):
        assert f"note: not written: {tmp_path / name}: Is a directory" in finished.out
    assert finished.out.rstrip().endswith("the result is not written")
    assert '"state": "failed"' in (tmp_path / "status.json").read_text()
    assert not [*tmp_path.glob(".*.*[0-9]")]


def test_rules_by_what_their_delay_does(tmp_path):
    random = "rules.late.delay={distribution: geometric, p: 0.5, least: 1, most: 3}"
    found = complete(
        "compare",
        tmp_path,
        *TINY,
        "+schedule@rules.late=cdp_v1",
        random,
        "+schedule@rules.published=published",
        "seeds=1",
        "diagnostics=2",
    )
    rules = {row["rule"]: row for row in found["metrics"]}
    assert list(rules) == ["dp", "cdp_v1", "cdp_v2", "late", "published"]
    assert rules["late"]["staleness_max"] == 3
    assert rules["late"]["staleness_mean"] == pytest.approx(11 / 7)
    for row in found["delays"]:
        if row["rule"] == "dp":
            assert row["cosine"] == pytest.approx(1, abs=1e-6)
    assert len(found["delays"]) == 5 * 4
    assert len(rows(tmp_path / "delays.csv")) == 5 * 4 * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["precision=fp8"], "unknown precision 'fp8': choose one of fp32, tf32, bf16, fp16"),
        (["checkpoint=[9]"], "unknown stage 9 in checkpoint: choose from 0 to 3"),
        (["checkpoint=3"], "give none, all or a list of stages"),
        (["clip=1", "clip_by=model"], "use clip_by=stage, or schedule=cdp_v1"),
        (["diagnostics=1", "runtime.order=scheduled"], "takes order=grouped"),
        (["ema=2"], "ema is a decay between 0 and 1, or null: got 2.0"),
    ],
)
def test_mistakes(arguments, words):
    assert words in refused("train", *TINY, *arguments)


def test_a_peak_is_of_a_gpu():
    message = refused("bench", "bench=peak", "device=cpu")
    assert "a GPU's peak is measured on a GPU: got device=cpu" in message

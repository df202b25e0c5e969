"""Training options and delay studies on the command line."""

import re

import pytest

from tests.experiments.command import TINY, cases, complete, refused, rows, run
from tests.thorough import thorough

pytestmark = pytest.mark.usefixtures("analysed_once")


def test_training_options(tmp_path):
    recipe = (
        "precision=bf16",
        "clip=0.5",
        "checkpoint=[0,2]",
        "ema=0.9",
        "channels_last=true",
    )
    plain = complete("train", tmp_path / "plain", *TINY)
    found = complete("train", tmp_path / "found", *TINY, *recipe)
    assert "ema_top1" not in plain["metrics"]
    assert 0 <= found["metrics"]["ema_top1"] <= 1
    assert found["metrics"]["train_loss"] != plain["metrics"]["train_loss"]
    assert found["delays"] == []


def test_delay_diagnostics(tmp_path):
    """A row for each stage and diagnosed step, and their means by stage."""
    found = complete(
        "train", tmp_path, *TINY, "schedule=cdp_v1", "epochs=2", "diagnostics=3"
    )
    written = rows(tmp_path / "delays.csv")
    assert [(row["step"], row["stage"]) for row in written] == [
        (step, stage) for step in "036" for stage in "0123"
    ]
    assert [row["stage"] for row in found["delays"]] == [0, 1, 2, 3]
    for row in found["delays"]:
        of_stage = [w for w in written if w["stage"] == str(row["stage"])]
        assert [float(w["delay"]) for w in of_stage] == [0, 1, 1]
        # The first step, in which nothing is late, does not count.
        assert row["delay"] == 1
        for name in ("cosine", "moved"):
            values = [float(w[name]) for w in of_stage[1:]]
            assert row[name] == pytest.approx(sum(values) / 2)


def test_notes_skipped_updates(tmp_path):
    found = complete("train", tmp_path, *TINY, "precision=fp16", "loss_scale=1e30")
    assert len(found["notes"]) == 4
    assert re.match(r"stage 0 left out (\d+) of \1 .* loss_scale", found["notes"][0])


def test_resumed_run_keeps_its_diagnostics(tmp_path):
    options = (*TINY, "schedule=cdp_v1", "diagnostics=2", "lr=constant")
    complete("train", tmp_path, *options)
    found = complete("train", tmp_path, f"resume={tmp_path}", "epochs=3")
    steps = [
        row["step"] for row in rows(tmp_path / "delays.csv") if row["stage"] == "0"
    ]
    assert steps == ["0", "2", "4", "6", "8", "10"]
    again = complete("train", tmp_path, f"resume={tmp_path}")
    assert again["metrics"] == found["metrics"]
    notes = [note.partition(": ")[0] for note in (*found["notes"], *again["notes"])]
    assert notes == ["resumed at step 4", "resumed at step 12"]


def test_prints_a_result_that_cannot_be_written(tmp_path):
    for name in ("result.json", "epochs.csv"):
        (tmp_path / name).mkdir()
    finished = run("train", *TINY, f"hydra.run.dir={tmp_path}")
    assert finished.status == 1
    assert "top-1" in finished.out
    for name in ("result.json", "epochs.csv"):
        assert f"note: not written: {tmp_path / name}: Is a directory" in finished.out
    assert '"state": "failed"' in (tmp_path / "status.json").read_text()
    assert not [*tmp_path.glob(".*.*[0-9]")]


def test_compares_random_and_published_delays(tmp_path):
    random = "rules.late.delay={distribution: geometric, p: 0.5, least: 1, most: 3}"
    more = (
        "+schedule@rules.late=cdp_v1",
        random,
        "+schedule@rules.published=published",
    )
    less = ("~rules.cdp_v1", "~rules.cdp_v2")
    found = complete(
        "compare", tmp_path, *TINY, *more, *less, "seeds=1", "diagnostics=2"
    )
    rules = {row["rule"]: row for row in found["metrics"]}
    assert list(rules) == ["dp", "late", "published"]
    assert rules["late"]["staleness_max"] == 3
    assert rules["late"]["staleness_mean"] == pytest.approx(11 / 7)
    fresh = [row["cosine"] for row in found["delays"] if row["rule"] == "dp"]
    assert fresh == pytest.approx([1] * 4, abs=1e-6)
    assert (len(found["delays"]), len(rows(tmp_path / "delays.csv"))) == (
        3 * 4,
        3 * 4 * 2,
    )


REFUSES = r"""
precision=fp8 | precision 'fp8'
checkpoint=[9] | stage 9 in checkpoint
checkpoint=3 | checkpoint.* 3
clip=1 clip_by=model | clip_by=stage
diagnostics=1 runtime.order=scheduled | order=grouped
ema=2 | ema: got 2.0
"""


@pytest.mark.parametrize(("arguments", "pattern"), cases(REFUSES))
def test_train_refuses(arguments, pattern):
    refused("train", *TINY, *arguments, match=pattern)


@thorough
def test_the_affordable_delay_is_a_matrix_in_the_record_and_resumes(tmp_path):
    options = (
        *TINY,
        "stages=2",
        "workers=2",
        "schedule.delay=affordable",
        "save.epochs=1",
    )
    refused(
        "train", *options, f"hydra.run.dir={tmp_path}", match="hardware=ethernet_10"
    )
    folder = tmp_path / "run"
    fast = [f"hardware.{name}=1e30" for name in ("memory_bandwidth", "link_bandwidth")]
    fast += ["hardware=ethernet_10", "hardware.link_latency=0"]
    found = complete("train", folder, *options, *fast)
    used = found["provenance"]["config"]["schedule"]["delay"]
    assert used == [[1, 0], [0, 0]]  # links without limit afford the freshest
    again = complete("train", folder, f"resume={folder}", "epochs=2")
    assert again["provenance"]["config"]["schedule"]["delay"] == used
    rules = (
        "~rules.cdp_v1",
        "rules.cdp_v2.delay=affordable",
        "hardware=ethernet_10",
        "seeds=1",
    )
    compared = complete(
        "compare", tmp_path / "compare", *TINY, "stages=2", "workers=2", *rules
    )
    (rule,) = (row for row in compared["metrics"] if row["rule"] == "cdp_v2")
    delay = compared["provenance"]["config"]["rules"]["cdp_v2"]["delay"]
    assert rule["staleness_mean"] == sum(map(sum, delay)) / 4

"""Recipes and delay studies as a user asks for them."""

import json
import re
import shutil
import weakref
from dataclasses import asdict

import pytest

from tests.experiments.command import TINY, refused, run
from tests.experiments.test_results import complete, rows
from tests.thorough import thorough
from toolkit.notebook import settings
from toolkit.tracking.compared import RuleRun, keep_runs
from toolkit.tracking.runs import read_runs
from toolkit.training import Epoch, job, loop

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
        (["checkpoint=[9]"], "checkpoint names stage 9 and there are 4: choose from 0 to 3"),
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


@thorough
def test_a_comparison_that_was_broken_off_goes_on_after_the_runs_that_have_ended(tmp_path):
    """The last run is as if it had been killed in its second epoch; a seed more is asked for."""
    options = (*TINY, "~rules.cdp_v1", "seeds=2", "epochs=2", "diagnostics=3")
    whole = complete("compare", tmp_path / "whole", *options)
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    path = tmp_path / "again" / "runs.csv"
    kept = path.read_text().splitlines()[:-1]
    path.write_text("\n".join([line.replace(",0.", ",7.") for line in kept]) + "\n")
    again = complete("compare", tmp_path / "again", f"resume={tmp_path / 'again'}", "seeds=3")
    assert again["notes"] == ["resumed: 3 runs had ended before, and take no seconds"]
    before, after = rows(tmp_path / "whole" / "runs.csv"), rows(path)
    assert len(after) == 2 * 3 * 2
    seen = [(row["rule"], row["seed"], row["epoch"]) for row in after]
    assert seen[:8] == [(row["rule"], row["seed"], row["epoch"]) for row in before]
    assert all(float(row["learning_rate"]) > 6 for row in after[:6])  # taken as they were
    for found, expected in zip(after[6:8], before[6:8], strict=True):
        assert found["train_loss"] == expected["train_loss"]  # trained again
    looks = rows(tmp_path / "again" / "delays.csv")
    assert len(looks) == 1.5 * len(rows(tmp_path / "whole" / "delays.csv"))
    assert whole["metrics"][0].keys() == again["metrics"][0].keys()


def test_a_comparison_outlives_runs_that_diverge(tmp_path, monkeypatch):
    """Late weights lose their way with seed 1, after an epoch; it is not tried again."""

    def fit(runtime, samples, *, epochs, seed, **options):
        lost = seed == 1 and runtime.schedule.max_staleness
        found = loop.fit(runtime, samples, epochs=1 if lost else epochs, seed=seed, **options)
        if lost:
            raise FloatingPointError("the training loss is nan")
        return found

    monkeypatch.setattr(job, "fit", fit)
    options = (*TINY, "~rules.cdp_v2", "epochs=3", "seeds=3")
    found = complete("compare", tmp_path, *options)
    (note,) = found["notes"]
    assert note.startswith("CDP-v1: the loss diverged (seed 1 in epoch 1), which counts in no mean")
    of_rule = [row for row in rows(tmp_path / "runs.csv") if row["rule"] == "cdp_v1"]
    assert [row["train_loss"] == "nan" for row in of_rule] == [False] * 4 + [True] * 2 + [False] * 3
    fresh, late = found["metrics"]
    assert (fresh["diverged"], late["diverged"]) == (0, 1)
    ends = [100 * float(row["top1"]) for row in (of_rule[2], of_rule[8])]
    assert late["accuracy"] == pytest.approx(sum(ends) / 2)
    states = [run.state for run in read_runs([tmp_path])]
    assert states == ["finished", "finished", "finished", "failed", "finished", "finished"]

    monkeypatch.undo()
    folder = f"hydra.run.dir={tmp_path / 'again'}"
    assert "CDP-v1 (1 of 3 diverged)" in run("compare", f"resume={tmp_path}", *options, folder).out
    again = complete("compare", tmp_path, f"resume={tmp_path}")
    assert again["notes"] == ["resumed: 6 runs had ended before, and take no seconds", note]
    assert again["metrics"] == found["metrics"]


def test_a_comparison_takes_the_place_of_no_other(compared):
    before = {path: path.read_bytes() for path in compared.rglob("*") if path.is_file()}
    options = [*TINY, "seeds=1", f"hydra.run.dir={compared}"]
    told = refused("compare", *options)
    assert f"{compared} has the runs of a comparison: resume={compared} goes on with it" in told
    assert all(path.read_bytes() == content for path, content in before.items())
    told = refused("communication", "workers=2", f"hydra.run.dir={compared}")
    assert f"{compared} has the runs of a comparison: for another one give another" in told


@pytest.fixture
def compared(tmp_path):
    """A comparison of two rules that are equally good, whose runs ended in another order."""
    keys = [("dp", 1), ("dp", 2), ("dp", 0), ("cdp_v1", 0), ("cdp_v1", 1), ("cdp_v1", 2)]
    runs = [
        RuleRun(rule, seed, [asdict(Epoch(0, 1.0, 1.0, seed / 10, 0.9, 0.1, 1.0))], [])
        for rule, seed in keys
    ]
    given = [*TINY, "~rules.cdp_v2", "seeds=3", "tracking.mode=disabled"]
    keep_runs(tmp_path, settings("compare", *given), runs)
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text(json.dumps(given))
    return tmp_path


def test_models_of_earlier_runs_make_room(tmp_path, monkeypatch):
    """They are parts of circles, which only the collector breaks, and it knows no GPU's memory."""
    seen, alive = [], []

    def counted(*arguments):
        prepared = job.prepare(*arguments)
        alive.append(sum(parameter() is not None for parameter in seen))
        seen.extend(weakref.ref(p) for p in prepared.runtime.stages.model.parameters())
        return prepared

    monkeypatch.setattr("toolkit.training.prepare", counted)
    complete("compare", tmp_path, *TINY, "epochs=1", "seeds=2", "~rules.cdp_v1")
    assert len(seen) > 4
    assert alive == [0, 0, 0, 0]


def test_a_comparison_pairs_runs_by_their_seeds(compared):
    found = complete("compare", compared, f"resume={compared}")
    assert [row["difference"] for row in found["metrics"]] == [0, 0]
    assert [row["difference_95"] for row in found["metrics"]] == [None, None]  # no spread
    assert found["notes"] == ["resumed: 6 runs had ended before, and take no seconds"]


def test_a_comparison_keeps_the_runs_that_it_is_not_asked_for(compared):
    before = rows(compared / "runs.csv")
    found = complete(
        "compare", compared, f"resume={compared}", "~rules.cdp_v1", "seed=2", "seeds=2"
    )
    assert [(row["rule"], row["difference"]) for row in found["metrics"]] == [("dp", 0)]
    assert found["notes"][1] == "runs.csv has 5 more, of other rules or seeds"
    after = rows(compared / "runs.csv")
    assert [(row["rule"], row["seed"], row["top1"]) for row in after[:6]] == [
        (row["rule"], row["seed"], row["top1"]) for row in before
    ]
    assert [(row["rule"], row["seed"]) for row in after[6:]] == [("dp", "3")]
    assert found["metrics"][0]["accuracy"] == pytest.approx(50 * (0.2 + float(after[6]["top1"])))


def test_a_comparison_goes_on_with_its_options_alone(compared):
    paths = [*(path for path in compared.rglob("*") if path.is_file())]
    before = [path.read_bytes() for path in paths]
    told = refused("compare", f"resume={compared}", "seeds=4", "optimizer.lr=0.5")
    assert "trained with other options: optimizer.lr=0.5 (was 0.1); leave them as they were" in told
    assert [path.read_bytes() for path in paths] == before


def test_what_is_no_comparison_cannot_be_resumed(tmp_path):
    complete("train", tmp_path, *TINY)
    told = refused("compare", f"resume={tmp_path}", *TINY)
    assert f"made by another experiment: python experiments/train.py resume={tmp_path}" in told
    (tmp_path / ".hydra" / "hydra.yaml").unlink()
    (tmp_path / "runs.csv").write_text("rule,seed\ndp")
    told = refused("compare", f"resume={tmp_path}", *TINY)
    assert "runs.csv cannot be read: line 2 has 1 cells of 2" in told

"""A comparison keeps its runs, and resumes them."""

import json
import os
import re
import signal
import weakref
from dataclasses import asdict, replace
from math import sqrt

import pytest

from tests.cli.test_resume import write_options
from tests.experiments.command import TINY, complete, refused, rows, run
from tests.thorough import thorough
from toolkit.cli import runs, settings
from toolkit.cli.instantiate import plain
from toolkit.results import comparison
from toolkit.results.comparison import RuleRun, keep_options, keep_runs
from toolkit.results.runs import read_runs
from toolkit.training import DivergedError, Epoch, loop

pytestmark = pytest.mark.usefixtures("analysed_once")


def stopped_in_run(k, *options, common=None):
    """Run a comparison in which a signal comes as the run ``k`` begins, the first one being 0."""
    runs = iter(range(1000))
    begin = comparison.prepare_folder

    def begun(*arguments, **more):
        if next(runs) == k:
            os.kill(os.getpid(), signal.SIGTERM)
        return begin(*arguments, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "prepare_folder", begun)
        finished = run("compare", *(common or OPTIONS), *options)
    assert finished.status == 75
    return finished.err


OPTIONS = (
    *TINY,
    "~rules.cdp_v1",
    "seeds=1",
    "epochs=2",
    "diagnostics=1",
    "tracking.every=1",
)


SCHEDULED = ("seeds=4", "runtime.order=scheduled")
KEPT = [*TINY, "~rules.cdp_v2", "seeds=3", "tracking.mode=disabled"]


def test_resumes_in_the_middle_of_a_run(tmp_path):
    """In step 2 of 4 of the second run's first epoch."""
    whole, folder = tmp_path / "whole", tmp_path / "again"
    expected = complete("compare", whole, *OPTIONS)
    options = "save.steps=2", f"hydra.run.dir={folder}"
    printed = stopped_in_run(1, *options)
    assert "stopped by SIGTERM" in printed
    assert f"cyclic-dp compare resume={folder}" in printed
    (saved,) = folder.glob("under_way/*/checkpoints/*")
    assert saved.name == "step_000000002.ckpt"
    assert [run.state for run in read_runs([folder])] == ["finished", "stopped"]
    refused("compare", *OPTIONS, *options, match=f"resume={folder}")

    found = complete("compare", folder, f"resume={folder}")
    assert not (folder / "under_way").exists()
    ended, continued = found["notes"]
    assert "1 run " in ended
    assert continued == "cdp_v2, seed 0: resumed at step 2"
    for name in ("train_loss", "test_loss", "top1"):
        was = [row[name] for row in rows(whole / "runs.csv")]
        assert [row[name] for row in rows(folder / "runs.csv")] == was
    assert [found[name] for name in ("metrics", "delays")] == [
        expected[name] for name in ("metrics", "delays")
    ]
    assert [run.state for run in read_runs([folder])] == ["finished"] * 2


def test_run_that_saved_nothing_begins_again(tmp_path):
    """Its delays and its run in W&B, too; another rule without a run may change."""
    options = ("data.n_train=128", "save.minutes=null", f"hydra.run.dir={tmp_path}")
    assert "is not saved" in stopped_in_run(0, *options)
    changed = "data.n_train=32", "epochs=1", "rules.cdp_v2.delay=2"
    complete("compare", tmp_path, f"resume={tmp_path}", *changed)
    assert {row["step"] for row in rows(tmp_path / "delays.csv")} == {"0", "1"}


def test_continues_after_a_run_that_diverges(tmp_path, monkeypatch):
    """Late weights diverge with seed 1, after an epoch; the run is not repeated."""
    whole = loop.fit

    def fit(run, *arguments):
        found = whole(run, *arguments)
        if run.options.seed == 1 and run.schedule.max_staleness:
            raise DivergedError("the training loss is nan", found[:1])
        return found

    monkeypatch.setattr(loop, "fit", fit)
    options = (*TINY, "~rules.cdp_v2", "epochs=2", "seeds=2")
    found = complete("compare", tmp_path, *options)
    (note,) = found["notes"]
    assert note.startswith("CDP-v1: the loss diverged (seed 1 in epoch 1)")
    of_rule = [row for row in rows(tmp_path / "runs.csv") if row["rule"] == "cdp_v1"]
    assert [row["train_loss"] == "nan" for row in of_rule] == [
        False,
        False,
        False,
        True,
    ]
    fresh, late = found["metrics"]
    assert (fresh["diverged"], late["diverged"]) == (0, 1)
    assert late["accuracy"] == pytest.approx(100 * float(of_rule[1]["top1"]))
    states = [run.state for run in read_runs([tmp_path])]
    assert states == ["finished", "finished", "finished", "failed"]

    monkeypatch.undo()
    again = run("compare", f"resume={tmp_path}")
    assert "CDP-v1 (1 of 2 diverged)" in again.out
    assert f"note: {note}" in again.out
    assert "4 runs " in again.out


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (
            ("compare", *TINY, "seeds=1", "hydra.run.dir={}"),
            "{} has the runs .* resume={}",
        ),
        (
            ("communication", "workers=2", "hydra.run.dir={}"),
            "{} has the runs .* hydra.run.dir",
        ),
        (
            ("compare", "resume={}", "seeds=4", "optimizer.lr=0.5"),
            r"optimizer.lr=0.5 \(was 0.1\)",
        ),
        (
            ("compare", "resume={}", *SCHEDULED, "runtime.boundary_compression=int8"),
            r"runtime.boundary_compression=int8 \(was none\)",
        ),
    ],
)
def test_refuses_to_overwrite_or_change_a_comparison(kept, arguments, pattern):
    before = files(kept)
    name, *options = (argument.replace("{}", str(kept)) for argument in arguments)
    refused(name, *options, match=pattern.replace("{}", str(kept)))
    after = files(kept)
    assert {path: after[path] for path in before} == before


@pytest.fixture
def kept(tmp_path):
    """A comparison of two rules with equal metrics; their runs ended in another order."""
    keys = [
        ("dp", 1),
        ("dp", 2),
        ("dp", 0),
        ("cdp_v1", 0),
        ("cdp_v1", 1),
        ("cdp_v1", 2),
    ]
    runs = [
        RuleRun(rule, seed, [asdict(Epoch(0, 1.0, 1.0, seed / 10, 0.9, 0.1, 1.0))], [])
        for rule, seed in keys
    ]
    keep_options(tmp_path, plain(settings("compare", *KEPT)))
    keep_runs(tmp_path, runs)
    write_options(tmp_path, KEPT, "compare")
    return tmp_path


def test_models_of_earlier_runs_are_freed(tmp_path, monkeypatch):
    """They are in reference cycles, and the garbage collector does not see a GPU's memory."""
    seen, alive, build_run = [], [], runs.build_run

    def counted(*arguments):
        prepared = build_run(*arguments)
        alive.append(sum(parameter() is not None for parameter in seen))
        seen.extend(weakref.ref(p) for p in prepared.runtime.stages.model.parameters())
        return prepared

    monkeypatch.setattr(runs, "build_run", counted)
    complete("compare", tmp_path, *TINY, "data.n_train=16", "seeds=1", "~rules.cdp_v1")
    assert len(seen) > 4
    assert alive == [0] * 4  # two that are only checked, and two that are trained


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        (["save.keep=0"], "save.keep .* got 0"),
        (["margin=0"], "margin .* above 0: got 0"),
        (["tracking.every=0"], "tracking.every .* got 0"),
        (["clip=1", "clip_by=model"], "CDP-v2.*clip_by=stage"),
    ],
)
def test_refuses_invalid_options_before_the_first_run(tmp_path, options, pattern):
    where = "tracking.mode=offline", f"hydra.run.dir={tmp_path}"
    finished = run("compare", *TINY, *options, *where)
    assert finished.status == 2
    assert finished.err.startswith("error: ")  # and no bar before it
    assert re.search(pattern, finished.err)
    assert not {"wandb", "under_way", "runs.csv"} & {
        path.name for path in tmp_path.iterdir()
    }


def test_pairs_runs_by_their_seeds(kept):
    found = complete("compare", kept, f"resume={kept}")
    assert [row["difference"] for row in found["metrics"]] == [0, 0]
    # No spread.
    assert [row["difference_95"] for row in found["metrics"]] == [None, None]


def test_tests_equivalence_at_a_margin(kept):
    """Differences of CDP-v1 are -10, 0 and 1 points: mean -3, standard deviation sqrt(37)."""
    changed = [
        run
        if run.rule == "dp"
        else replace(run, epochs=[run.epochs[0] | {"top1": top1}])
        for run in comparison.read_ended_runs(kept, plain(settings("compare", *KEPT)))
        for top1 in [{0: -0.1, 1: 0.1, 2: 0.21}[run.seed]]
    ]
    keep_runs(kept, changed)
    finished = run("compare", f"resume={kept}", "margin=25")
    assert "at a margin of 25" in finished.out
    found = json.loads((kept / "result.json").read_text())["metrics"]
    t = 22 / sqrt(37 / 3)  # with two degrees of freedom
    assert [row["verdict"] for row in found] == ["", "equivalent within 25"]
    assert found[1]["equivalence_p"] == pytest.approx((1 - t / sqrt(t**2 + 2)) / 2)
    assert [row["verdict"] for row in rows(kept / "comparison.csv")] == [
        "",
        "equivalent within 25",
    ]
    assert (
        "verdict"
        not in complete("compare", kept, f"resume={kept}", "margin=null")["metrics"][0]
    )


def test_keeps_runs_of_other_rules_and_seeds(kept):
    before = rows(kept / "runs.csv")
    found = complete(
        "compare", kept, f"resume={kept}", "~rules.cdp_v1", "seed=2", "seeds=2"
    )
    assert [(row["rule"], row["difference"]) for row in found["metrics"]] == [("dp", 0)]
    assert "runs.csv has 5 more" in found["notes"][1]
    after = [(row["rule"], row["seed"], row["top1"]) for row in rows(kept / "runs.csv")]
    assert after[:6] == [(row["rule"], row["seed"], row["top1"]) for row in before]
    (rule, seed, top1) = after[6]
    assert (rule, seed) == ("dp", "3")
    assert found["metrics"][0]["accuracy"] == pytest.approx(50 * (0.2 + float(top1)))


@thorough
def test_a_kept_comparison_grows(tmp_path):
    """From its result and the runs that ended, without the files of Hydra."""
    folder, kept = tmp_path / "whole", tmp_path / "kept"
    complete("compare", folder, *OPTIONS)
    kept.mkdir()
    for name in ("result.json", "runs.csv"):
        (kept / name).write_bytes((folder / name).read_bytes())
    before = rows(kept / "runs.csv")
    found = complete("compare", kept, f"resume={kept}", "seeds=2")
    after = rows(kept / "runs.csv")
    assert [row for row in after if row["seed"] == "0"] == before
    assert {row["seed"] for row in after} == {"0", "1"}
    assert len(found["metrics"]) == 2
    refused(
        "compare",
        f"resume={kept}",
        "seeds=3",
        "optimizer.lr=0.5",
        match="optimizer.lr=0.5",
    )


def test_refuses_to_resume_other_folders(tmp_path):
    write_options(tmp_path, TINY, "train")
    resume = f"resume={tmp_path}"
    refused("compare", resume, *TINY, match=f"cyclic-dp train {resume}")
    write_options(tmp_path, TINY, "compare")
    (tmp_path / "runs.csv").write_text("rule,seed\ndp")
    refused("compare", resume, *TINY, match="runs.csv .* line 2")


@thorough
def test_refuses_a_schedule_file_that_has_changed(tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    options = [
        *TINY,
        "stages=2",
        "microbatches=2",
        *(f"~rules.{r}" for r in ("cdp_v1", "cdp_v2")),
    ]
    options += [
        "~rules.dp",
        "+schedule@rules.mine=dp",
        f"rules.mine.file={file}",
        "seeds=1",
    ]
    folder = tmp_path / "runs"
    complete("compare", folder, *options)
    file.write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    refused("compare", f"resume={folder}", "seeds=2", match="rules.mine.file_sha256=")


@thorough
def test_warns_and_tries_again_if_runs_cannot_be_written(tmp_path, monkeypatch):
    """And keeps the notes of runs."""
    writes = iter(range(100))
    write = comparison.keep_runs

    def full(folder, runs):
        if next(writes) == 0:
            raise OSError(28, "No space left on device", str(folder / "runs.csv"))
        write(folder, runs)

    monkeypatch.setattr(comparison, "keep_runs", full)
    options = (*TINY, "precision=fp16", "loss_scale=1e30", "seeds=1", "~rules.cdp_v1")
    finished = run("compare", *options, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0
    assert "runs.csv: No space left on device" in finished.err
    assert [row["rule"] for row in rows(tmp_path / "runs.csv")] == ["dp", "cdp_v2"]
    notes = [
        f"{rule}, seed 0: stage {k} " for rule in ("dp", "cdp_v2") for k in range(4)
    ]
    assert all(f"note: {note}" in finished.out for note in notes)
    again = complete("compare", tmp_path, f"resume={tmp_path}")
    found = [note for note in again["notes"] if "seed 0" in note]
    assert [note[: note.index("stage ") + 8] for note in found] == notes

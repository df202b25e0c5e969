"""A resumed comparison has its earlier runs, and trains as they were trained."""

import re
from math import nan

import pytest

from toolkit.errors import UserError
from toolkit.results.comparison import (
    RuleRun,
    folder_of_run,
    keep_options,
    keep_runs,
    read_ended_runs,
    select_runs,
)

RULES = {"dp": {"delay": 0}, "late": {"delay": {"distribution": "uniform", "most": 2}}}


def options(**more):
    own = {
        "seed": 0,
        "seeds": 2,
        "epochs": 2,
        "optimizer": {"lr": 0.1},
        "threads": None,
    }
    return own | {"rules": RULES, "resume": None} | more


def ended(rule, seed, top1=0.5, epochs=2):
    rows = [
        {"epoch": k, "train_loss": 1.0, "top1": top1, "ema_top1": None}
        for k in range(epochs)
    ]
    return RuleRun(
        rule, seed, rows, [{"step": 0, "stage": 1, "delay": 1.0, "cosine": 0.5}]
    )


def keep(folder, config, runs):
    keep_options(folder, config)
    keep_runs(folder, runs)


@pytest.fixture
def folder(tmp_path):
    keep(tmp_path, options(), [ended(rule, seed) for seed in (0, 1) for rule in RULES])
    return tmp_path


def test_runs_are_read_as_they_were_kept(folder):
    assert read_ended_runs(folder, options()) == [
        ended(rule, seed) for seed in (0, 1) for rule in RULES
    ]
    assert read_ended_runs(folder / "nowhere", options()) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"optimizer": {"lr": 0.2}}, "optimizer.lr=0.2 (was 0.1)"),
        ({"epochs": 3}, "epochs=3 (was 2)"),
        ({"clip": 1.0}, "clip=1.0 (was None)"),
        ({"rules": RULES | {"dp": {"delay": 4}}}, "rules.dp.delay=4 (was 0)"),
        (
            {
                "rules": RULES
                | {"late": {"delay": {"distribution": "uniform", "most": 3}}}
            },
            "rules.late.delay.most=3 (was 2)",
        ),
    ],
)
def test_other_options_are_refused(folder, change, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        read_ended_runs(folder, options(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": 5, "seed": 1},
        {
            "threads": 4,
            "tracking": {"mode": "disabled"},
            "device": "cpu",
            "resume": "F",
        },
        {"data": {"root": "/elsewhere"}},
        {
            "data": {"num_workers": 8, "prefetch_factor": 4},
            "workers": 2,
            "diagnostics": 5,
        },
        {"runtime": {"_target_": "toolkit.runtime.Distributed"}},
        {"rules": {"dp": RULES["dp"]}},
        {"rules": RULES | {"new": {"delay": 1}}},
    ],
)
def test_what_changes_no_trajectory_may_change(folder, change):
    assert len(read_ended_runs(folder, options(**change))) == 4


def test_options_of_one_rule_count_where_it_has_run(tmp_path):
    own = {"late": {"optimizer": {"lr": 0.05}}}
    keep(tmp_path, options(own=own), [ended("dp", 0), ended("late", 0)])
    new = RULES | {"new": {"delay": 1}}
    more = own | {"new": {"optimizer": {"lr": 3.0}}}
    assert len(read_ended_runs(tmp_path, options(rules=new, own=more))) == 2
    keep_options(tmp_path, options(rules={"dp": RULES["dp"]}, own={}))
    assert len(read_ended_runs(tmp_path, options(own=own))) == 2
    for other, was in (
        ({}, "None (was 0.05)"),
        ({"late": {"optimizer": {"lr": 1.0}}}, "1.0 (was"),
    ):
        with pytest.raises(UserError, match=re.escape(f"own.late.optimizer.lr={was}")):
            read_ended_runs(tmp_path, options(own=other))


def test_a_rule_without_runs_may_change(tmp_path):
    keep(tmp_path, options(), [ended("dp", 0)])
    assert read_ended_runs(tmp_path, options(rules=RULES | {"late": {"delay": 7}}))


def test_a_run_that_was_saved_under_way_counts_until_it_has_ended(tmp_path):
    begun = [folder_of_run(tmp_path, rule, 2) for rule in RULES]
    for path in begun:
        (path / "checkpoints").mkdir(parents=True)
    # Only the second run has saved a checkpoint.
    (begun[1] / "checkpoints" / "step_000000001.ckpt").touch()
    keep_options(tmp_path, options())
    assert read_ended_runs(tmp_path, options(rules=RULES | {"dp": {"delay": 4}})) == []
    other = options(rules=RULES | {"late": {"delay": 4}})
    with pytest.raises(ValueError, match=re.escape("rules.late.delay=4 (was None)")):
        read_ended_runs(tmp_path, other)
    keep_runs(tmp_path, [ended("dp", 2)])
    assert [path.exists() for path in begun] == [False, True]
    keep_runs(tmp_path, [ended("dp", 2), ended("late", 2)])
    assert not begun[1].parent.exists()


def test_runs_that_are_not_asked_for_are_kept(folder):
    """With the options of their rules, which count when they are asked for again."""
    less = options(seed=1, seeds=1, rules={"dp": RULES["dp"]})
    runs = read_ended_runs(folder, less)
    assert [(run.rule, run.seed) for run in select_runs(less, runs)] == [("dp", 1)]
    keep(folder, less, [*runs, ended("dp", 2)])
    assert len(read_ended_runs(folder, options())) == 5
    with pytest.raises(ValueError, match=re.escape("rules.late.delay=9 (was None)")):
        read_ended_runs(folder, options(rules=RULES | {"late": {"delay": 9}}))


def test_a_run_that_was_broken_off_has_not_ended_and_one_that_diverged_has(tmp_path):
    lost = ended("late", 0)
    lost.epochs[1] |= {"train_loss": nan, "top1": nan}
    keep(tmp_path, options(), [ended("dp", 0), ended("dp", 1, epochs=1), lost])
    found = read_ended_runs(tmp_path, options())
    assert [(run.rule, run.seed, run.diverged_in) for run in found] == [
        ("dp", 0, None),
        ("late", 0, 1),
    ]


@pytest.mark.parametrize("content", [None, "", "[1]", "a: [", "rules: 3"])
def test_runs_of_unknown_options_are_refused(folder, content):
    path = folder / "runs.yaml"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"no readable runs\.yaml"):
        read_ended_runs(folder, options())

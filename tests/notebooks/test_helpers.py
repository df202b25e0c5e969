"""What notebooks use beside the toolkit."""

import json
import os
import sys
from math import nan

import pandas as pd
import pytest
import torch

from toolkit.cost.situations import assess_situation, situations
from toolkit.errors import UserError
from toolkit.format import metric_cells
from toolkit.metric import ACCURACY, LOSS
from toolkit.notebook import (
    RESULTS,
    Live,
    by_epoch,
    counted_and_measured,
    delay_study,
    differences,
    in_words,
    own_curves,
    settings,
    train_rules,
    watched,
    when_cdp_helps,
)
from toolkit.plan import pilot
from toolkit.results.collect import learning_curves
from toolkit.runtime import JobFailedError
from toolkit.runtime.meters.measurements import Measurements
from toolkit.runtime.meters.predicted_vs_measured import MeasuredRow
from toolkit.schedule.paper_table import compare


def test_settings_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = settings("train", "workers=3", "schedule=dp")
    assert (config.microbatches, config.schedule.n, config.schedule.n_stages) == (
        3,
        3,
        4,
    )


@pytest.mark.parametrize(
    ("experiment", "options", "message"),
    [
        ("train", ["epoch=3"], r"epoch: did you mean epochs\?"),
        ("train", ["epochs=many"], "epochs=many"),
        ("train", ["epochs"], "'epochs' is not OPTION=VALUE"),
        ("train", ["schedule=null"], "schedule=null .*cdp_v1"),
        ("train", ["workers=3", "microbatches=4"], "workers=3 and microbatches=4"),
        ("memory", ["hardware=a100"], "hardware=a100 .*a100_nvlink"),
        ("trian", [], r"'trian': did you mean train\?"),
    ],
)
def test_mistakes_in_settings_are_one_sentence(experiment, options, message):
    with pytest.raises(UserError, match=message) as refused:
        settings(experiment, *options)
    assert "\n" not in str(refused.value)


def test_without_the_repository_there_are_no_settings(monkeypatch, tmp_path):
    monkeypatch.setattr("toolkit.files._HOME", tmp_path)
    with pytest.raises(UserError, match="conf"):
        settings("train")


@pytest.mark.parametrize(
    ("name", "measure", "says"),
    [
        ("cifar10_narrow_8", ACCURACY, ["", "lower", "lower", "no difference shown"]),
        ("text", LOSS, ["", "higher", "higher", "higher"]),
    ],
)
def test_differences_are_those_of_the_kept_result(name, measure, says):
    epochs = learning_curves(RESULTS / name)
    result = json.loads((RESULTS / name / "result.json").read_text())
    found = differences(epochs, measure=measure)
    assert list(found["says"]) == says
    assert found.drop(columns=["says", "runs"]).to_dict("index") == {
        row["schedule"]: metric_cells(row, measure, "DP") for row in result["metrics"]
    }
    one = differences(epochs[epochs["seed"] == 0], measure=measure)
    assert one.loc["CDP-v1", "says"] == "no spread: nothing"
    assert by_epoch(epochs, measure)["DP"] == [
        (run[measure.key] / measure.factor).tolist()
        for _, run in epochs[epochs["rule"] == "dp"].groupby("seed")
    ]
    with pytest.raises(UserError, match=r"'SGD' .*DP, CDP-v1"):
        differences(epochs, "SGD", measure)
    with pytest.raises(UserError, match=f"lacks {measure.key}"):
        differences(epochs.drop(columns=measure.key), measure=measure)


def test_differences_in_words():
    """Two rules whose difference is, and is not, shown, and one with a single seed."""
    epochs = table(
        *[("DP", seed, [90.0]) for seed in range(3)],
        *[("X", seed, [value]) for seed, value in enumerate([89.0, 90.0, 90.5])],
        *[("Y", seed, [value]) for seed, value in enumerate([85.0, 84.0, 86.0])],
        ("Z", 0, [91.0]),
    )
    found = in_words(epochs, margin=1)
    assert found._repr_markdown_() == found
    assert found.splitlines() == [
        "- **X** ends 0.17 points below DP (interval -2.06 to +1.73): no difference shown;"
        " equivalence within 1 is not shown.",
        "- **Y** ends 5.00 points below DP (interval -7.48 to -2.52): lower; worse by at least"
        " 2.52.",
        "- **Z** ends 1.00 points above DP, with 1 run and no spread: this shows nothing.",
    ]
    shown = in_words(epochs, margin=5).splitlines()[0]
    assert shown.endswith("no difference shown; equivalent within 5.")
    verdicts = ["-", "equivalent within 5", "worse by at least 2.52", "-"]
    assert list(differences(epochs, margin=5)["at a margin of 5"]) == verdicts


def table(*runs, **more):
    """Epochs of runs, each of a schedule, a seed, and its accuracies in per cent."""
    rows = [
        {"schedule": rule, "seed": seed, "epoch": k, "top1": top1} | more
        for rule, seed, accuracies in runs
        for k, top1 in enumerate(accuracies)
    ]
    return pd.DataFrame(rows)


def test_two_runs_of_one_seed_are_not_mixed():
    """Nor are they averaged: they may differ in any option."""
    one, other = (table(("DP", 3, [10, 20]), folder=name, rule="dp") for name in "ab")
    both = pd.concat([one, other])
    for use in (differences, by_epoch):
        for runs in (both, both.drop(columns=["folder", "rule"])):
            with pytest.raises(UserError, match="DP have seed 3"):
                use(runs)
    assert by_epoch(both[both["folder"] == "b"]) == {"DP": [[0.1, 0.2]]}


def test_rules_of_a_comparison_that_share_a_name_get_labels():
    late = [
        table(("CDP delay 2", 0, [10 * k]), folder="a", rule=f"late_{k}")
        for k in (1, 2)
    ]
    rest = (
        table(("DP", 0, [30]), folder="a", rule="dp"),
        table(("DP", 1, [50]), folder="b", rule="dp"),
    )
    assert by_epoch(pd.concat([*late, *rest])) == {
        "CDP delay 2 (late_1)": [[0.1]],
        "CDP delay 2 (late_2)": [[0.2]],
        "DP": [[0.3], [0.5]],
    }


def test_what_has_not_finished_does_not_count():
    whole = table(("DP", 0, [10, 20]), ("CDP-v1", 0, [10, 20]), state="finished")
    killed = table(
        ("DP", 1, [90]), ("CDP-v1", 1, [90]), ("CDP-v2", 1, [90]), state="running"
    )
    both = pd.concat([whole, killed])
    assert by_epoch(both) == {"DP": [[0.1, 0.2]], "CDP-v1": [[0.1, 0.2]]}
    with pytest.raises(UserError, match="'DP' has finished: got runs of none"):
        differences(killed)


def test_differences_pair_by_seed():
    found = differences(
        table(("DP", 1, [80]), ("DP", 0, [90]), ("X", 0, [91]), ("X", 1, [81]))
    )
    assert found.loc["X", "paired difference from DP"] == "+1.00"
    with pytest.raises(UserError, match=r"seeds.*got 2, 3 and 0"):
        differences(table(("DP", 0, [90]), ("X", 2, [91]), ("X", 3, [91])))


@pytest.mark.parametrize("states", [False, True])
def test_runs_that_have_diverged_count_in_no_mean(states):
    """Whatever their state; other unfinished runs are left out."""
    runs = (
        ("DP", 0, [80]),
        ("DP", 1, [90]),
        ("X", 0, [nan]),
        ("X", 1, [81]),
        ("Y", 0, [nan]),
    )
    epochs = table(*runs).assign(train_loss=[1.0, 1.0, nan, 1.0, nan])
    if states:
        epochs["state"] = ["finished", "finished", "failed", "finished", "unfinished"]
        epochs = pd.concat(
            [epochs, table(("Z", 0, [70]), state="failed", train_loss=1.0)]
        )
    found = differences(epochs)
    assert found[
        ["runs", "test accuracy (%)", "paired difference from DP"]
    ].values.tolist() == [
        [2, "85.00 ± 7.07", "+0.00"],
        [1, "81.00", "-9.00"],
        [0, "-", "-"],
    ]


def test_differences_are_of_as_many_epochs():
    unequal = table(("DP", 0, [1, 2, 3]), ("X", 0, [1, 2, 3]), ("X", 1, [1, 2]))
    with pytest.raises(UserError, match=r'2, 3 epochs.*epochs\["epoch"\] < 2'):
        differences(unequal)
    assert list(differences(unequal[unequal["epoch"] < 2])["runs"]) == [1, 1]


def test_own_curves_are_as_long_as_the_shortest():
    kept = table(("DP", 0, [1, 2, 3]), ("X", 0, [1, 2]))
    own = table(("DP", 0, [5, 6, 7]), ("X", 0, [5, 6, 7]), ("Y", 0, [9]))
    assert own_curves(kept, own) == {
        "DP, kept": [[0.01, 0.02]],
        "X, kept": [[0.01, 0.02]],
        "DP, own": [[0.05, 0.06]],
        "X, own": [[0.05, 0.06]],
    }
    with pytest.raises(UserError, match="rule: got DP, X and Y"):
        own_curves(kept, own[own["schedule"] == "Y"])


def test_delays_of_the_kept_study():
    found = delay_study(RESULTS / "delays")
    assert list(found.index)[:2] == ["DP", "CDP-v1"]
    assert found.loc["DP", "least cosine"] == "1.00"
    assert found.loc["DP delay 4", "paired difference from DP"].startswith("-")
    by_loss = differences(learning_curves(RESULTS / "text"), measure=LOSS)
    name = "paired difference from DP"
    assert list(delay_study(RESULTS / "text", LOSS)[name]) == list(by_loss[name])


def test_rules_of_a_study_that_share_a_name_get_labels(tmp_path):
    result = json.loads((RESULTS / "delays" / "result.json").read_text())
    result["metrics"][2]["schedule"] = result["metrics"][1]["schedule"]
    (tmp_path / "result.json").write_text(json.dumps(result))
    found = delay_study(tmp_path)
    assert list(found.index)[1:3] == ["CDP-v1 (cdp_v1)", "CDP-v1 (cdp_v2)"]


@pytest.mark.parametrize("name", ["nothing", "memory_resnet50", "communication"])
def test_a_study_is_a_comparison_that_has_ended(name):
    with pytest.raises(UserError, match=name):
        delay_study(RESULTS / name)


def test_what_is_no_comparison_is_not_trained():
    with pytest.raises(UserError, match=r'settings\("compare"'):
        train_rules(settings("train"), [0])
    with pytest.raises(UserError, match=r"tune\.rates=\[1\] is for cyclic-dp compare"):
        train_rules(settings("compare", "experiment=digits", "tune.rates=[1]"), [0])
    for seeds in (2, []):
        with pytest.raises(UserError, match=r"seeds .*got "):
            train_rules(settings("compare", "experiment=digits"), seeds)


def test_own_runs_beside_kept_ones():
    small = (
        "data=synthetic",
        "data.image_size=8",
        "data.n_train=128",
        "data.n_test=50",
    )
    late = ("rules.cdp_v1.delay=2", "+schedule@rules.late=cdp_v1", "rules.late.delay=2")
    own_seed = "seed=3", "seeds=1"
    config = settings(
        "compare", "experiment=digits", *late, "epochs=1", "ema=0.5", *small, *own_seed
    )
    said = []
    own = train_rules(config, on_epoch=lambda what, share: said.append((what, share)))
    names = ["DP", "CDP delay 2 (cdp_v1)", "CDP-v2", "CDP delay 2 (late)"]
    assert said == [
        *((f"{name}, seed 3", k / 4) for k, name in enumerate(names)),
        ("4 runs", 1.0),
    ]
    assert list(own["schedule"]) == names
    for name in ("top1", "top5", "ema_top1"):
        assert ((own[name] > 1) & (own[name] <= 100)).all()
    kept = learning_curves(RESULTS / "digits")
    curves = own_curves(kept, own)
    assert list(curves) == ["DP, kept", "CDP-v2, kept", "DP, own", "CDP-v2, own"]
    assert {len(run) for runs in curves.values() for run in runs} == {1}
    assert curves["DP, own"] == [[own["top1"][0] / 100]]
    assert [len(runs) for runs in by_epoch(kept).values()] == [5, 5, 5]


def test_counted_and_measured():
    rows = compare(2)
    found = counted_and_measured(rows)
    assert len(found) == len(rows) == 15
    assert found.loc[("multi-device", "DP"), "sent"] == "1 P"
    assert "measured" not in found
    ran = [  # as if rows had run, each as it was counted
        MeasuredRow(row.setting, row.rule, {}, {}, Measurements(row.schedule, ()))
        for row in rows
    ]
    assert set(counted_and_measured(rows, ran)["measured"]) == {"equal"}
    with pytest.raises(UserError, match=r"schedules differ.*compare\(n\)"):
        counted_and_measured(compare(3), ran)


def test_when_cdp_helps():
    found = when_cdp_helps(map(assess_situation, situations([2], [2.0])))
    assert found.loc["one device", 2, "0"].tolist()[:2] == ["1", "2 → 1.5"]
    assert (
        found.loc["one device per worker, slow links", 2, "2"]["CDP-v2"]
        == "0.83 (0.25)"
    )


def test_bars_follow_reports(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Live("training", total=2) as live:
        live.report(1, "setting one")
        live.report(0, {"step": 1, "n_steps": 4, "loss": 2.5, "lr": 0.1})
        live.report(0, {"step": 2, "n_steps": 4, "loss": 1.5, "lr": 0.1})
    found = [(bar.desc, bar.n / bar.total, bar.postfix) for bar in live.bars]
    assert found == [
        ("training, rank 0", 0.5, "loss=1.5, lr=0.1"),
        ("training, rank 1", 0.5, "setting one"),
    ]
    with Live("pilot") as live:
        live.say("timing steps", 0.75)
        live.say("predicting", 0.25)
    (bar,) = live.bars
    assert (bar.n, bar.postfix) == (0.25, "predicting")


def test_an_error_in_a_cell_is_one_sentence():
    with pytest.raises(UserError, match="n_workers") as refused, Live("pilot"):
        pilot(torch.nn.Linear(3, 2), torch.randn(8, 3), n_workers=0)
    (line,) = refused.value._render_traceback_()
    assert line == f"UserError: {refused.value}"
    with pytest.raises(KeyError) as bug, Live("pilot"):
        raise KeyError("a bug keeps its traceback")
    assert not hasattr(bug.value, "_render_traceback_")


def test_a_rank_that_dies():
    with pytest.raises(JobFailedError) as failed:
        watched(os._exit, 1, 3, title="dies")
    assert failed.value._render_traceback_() == [
        "JobFailedError: rank 0 ended with status 3 and no result"
    ]

"""A comparison gives each rule its own options, or finds the best rate of each."""

import json

import pytest

from tests.experiments.command import TINY, complete, refused, rows, run
from tests.experiments.test_comparisons import stopped_in_run
from tests.thorough import thorough
from toolkit.results.runs import read_runs

pytestmark = pytest.mark.usefixtures("analysed_once")

SMALL = (
    *TINY,
    "data.image_size=4",
    "data.n_train=32",
    "stages=2",
    "microbatches=2",
    "~rules.cdp_v1",
)
TUNED = (*SMALL, "tune.rates=[0.5,1]", "tune.epochs=1", "tracking.mode=disabled")


def test_trains_each_rule_at_its_best_rate(tmp_path):
    """More seeds and rules do not tune again what was tuned; other rates are refused."""
    folder = tmp_path / "a"
    found = complete("compare", folder, *TUNED, "seeds=1")
    trials = rows(folder / "tuning" / "runs.csv")
    assert [(row["rule"], row["seed"]) for row in trials] == [
        (f"{rule}_x{factor}", "1000")
        for rule in ("dp", "cdp_v2")
        for factor in ("0.5", "1")
    ]
    best = {row["rule"]: row["lr"] for row in found["tuning"] if row["best"]}
    by_rate = {(row["rule"], row["lr"]): row["accuracy"] for row in found["tuning"]}
    for rule, lr in best.items():
        top = max(value for (name, _), value in by_rate.items() if name == rule)
        assert by_rate[rule, lr] == top
    assert {row["rule"]: row["lr"] for row in found["metrics"]} == best
    own = found["provenance"]["config"]["own"]
    assert {rule: options["optimizer"]["lr"] for rule, options in own.items()} == best
    assert [run.config["optimizer"]["lr"] for run in read_runs([folder])] == [
        *best.values()
    ]
    # Two have edges.
    assert sum("the best of its rates" in note for note in found["notes"]) == 2

    by_hand = tmp_path / "by_hand"
    rates = (f"+own.{rule}.optimizer.lr={lr}" for rule, lr in best.items())
    again = complete(
        "compare", by_hand, *SMALL, *rates, "seeds=1", "tracking.mode=disabled"
    )
    columns = ("train_loss", "test_loss", "top1")
    assert [[row[name] for name in columns] for row in rows(by_hand / "runs.csv")] == [
        [row[name] for name in columns] for row in rows(folder / "runs.csv")
    ]
    assert "tuning" not in again

    more = "seeds=2", "+schedule@rules.late=cdp_v1"
    grown = complete("compare", folder, f"resume={folder}", *more)
    assert rows(folder / "tuning" / "runs.csv")[:4] == trials
    assert "resumed: 2 runs had ended before" in grown["notes"][0]
    assert [row for row in grown["tuning"] if row["rule"] != "late"] == found["tuning"]
    other = next(k for k in (0.5, 1) if 0.1 * k != best["dp"])
    changed = f"own.dp.optimizer.lr={0.1 * other:g} "
    refused("compare", f"resume={folder}", f"tune.rates=[{other}]", match=changed)


@thorough
def test_resumes_in_the_middle_of_the_trials(tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "again"
    expected = complete("compare", whole, *TUNED, "tune.epochs=2", "seeds=1")
    printed = stopped_in_run(
        1,
        "seeds=1",
        f"hydra.run.dir={folder}",
        common=(*TUNED, "tune.epochs=2", "save.steps=2"),
    )
    assert f"resume={folder}" in printed
    assert not (folder / "runs.csv").exists()
    assert {row["rule"] for row in rows(folder / "tuning" / "runs.csv")} == {"dp_x0.5"}
    refused("compare", *TUNED, f"hydra.run.dir={folder}", match=f"resume={folder}")
    found = complete("compare", folder, f"resume={folder}")
    assert [found[name] for name in ("metrics", "tuning")] == [
        expected[name] for name in ("metrics", "tuning")
    ]


def test_a_rule_has_its_own_optimizer_in_the_table(tmp_path):
    options = (
        *("+schedule@rules.fresh=dp", "+optimizer@own.fresh.optimizer=nadam"),
        *("+own.cdp_v2.optimizer.nesterov=true", "+own.cdp_v2.clip=0.5", "seeds=1"),
    )
    finished = run("compare", *SMALL, *options, f"hydra.run.dir={tmp_path}")
    assert finished.status == 0, finished.err
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["lr"] for row in result["metrics"]] == [0.1, 0.1, 0.001]
    labels = ("DP (dp)", "CDP-v2", "DP (fresh)", "learning rate")
    assert all(label in finished.out for label in labels)
    plain, changed, fresh = (run.config for run in read_runs([tmp_path]))
    assert (plain["clip"], changed["clip"]) == (None, 0.5)
    assert changed["optimizer"] == plain["optimizer"] | {"nesterov": True}
    assert fresh["optimizer"]["_target_"] == "torch.optim.NAdam"
    assert "momentum" not in fresh["optimizer"]


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("+own.cdp.clip=1", "own.cdp .* not compared: .* dp, cdp_v2"),
        (
            "+own.dp.batch=8",
            "own.dp.batch: rules differ in optimizer, lr, clip, ema, readout",
        ),
        ("+own.dp.optimizer.lrr=1", "own.dp.optimizer.lrr: .* did you mean lr"),
        ("own.dp.clip=1", r"\+own.dp.clip="),
        ("tune.seed=1 tune.rates=[1]", "tune.seed=1 is a seed of the comparison"),
        ("tune.rates=2", "tune.rates is a list of factors above 0: got 2"),
        ("tune.rate=[1]", "did you mean tune.rates"),
    ],
)
def test_refuses(tmp_path, option, pattern):
    refused(
        "compare", *SMALL, *option.split(), f"hydra.run.dir={tmp_path}", match=pattern
    )
    assert not (tmp_path / "tuning").exists()

"""Rates are chosen by trials, and no rule gets the rate of another."""

import re
from math import nan

import pytest

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS
from toolkit.results.comparison import RuleRun
from toolkit.results.tuning import edge_notes, trials, tried, with_best

SGD = {"_target_": "SGD", "lr": 0.1, "momentum": 0.9}
NADAM = {"_target_": "NAdam", "lr": 0.002}


def options(rates=(3, 1, 0.5), **more):
    own = {"late": {"optimizer": NADAM, "clip": 1.0}}
    tune = {"rates": list(rates), "epochs": 2, "seed": 1000} | more.pop("tune", {})
    return {
        "rules": {"dp": {"delay": 0}, "late": {"delay": 1}},
        "own": own,
        "optimizer": SGD,
        "tune": tune,
        "seed": 0,
        "seeds": 5,
        "epochs": 30,
        "diagnostics": 20,
        "readout": "newest",
        "tracking": {"mode": "online", "project": "cdp"},
    } | more


def ran(**ends):
    """Trials by name, each with its final accuracy (a share) and test loss."""
    return [
        RuleRun(
            name,
            1000,
            [{"train_loss": top1 and loss, "top1": top1, "test_loss": loss}],
            [],
        )
        for name, (top1, loss) in ends.items()
    ]


def test_trials_are_each_rule_at_each_rate():
    found = trials(options())
    assert found["rules"] == {
        **{f"dp_x{factor}": {"delay": 0} for factor in (3, 1, 0.5)},
        **{f"late_x{factor}": {"delay": 1} for factor in (3, 1, 0.5)},
    }
    # And not 0.30000000000000004.
    assert found["own"]["dp_x3"] == {"optimizer": {"lr": 0.3}}
    assert found["own"]["late_x0.5"] == {
        "optimizer": NADAM | {"lr": 0.001},
        "clip": 1.0,
    }
    assert [found[name] for name in ("seed", "seeds", "epochs")] == [1000, 1, 2]
    assert found["tracking"] == {"mode": "disabled", "project": "cdp"}
    assert found["optimizer"] == SGD


@pytest.mark.parametrize(
    ("readout", "of_trials"),
    [
        ("newest", "newest"),
        ("extrapolated", "extrapolated"),
        ("as_published", "newest"),
    ],
)
def test_trials_read_out_the_weights_that_judge_them(readout, of_trials):
    assert trials(options(readout=readout))["readout"] == of_trials


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"tune": {"seed": 4}}, "tune.seed=4 is a seed of the comparison, 0 to 4"),
        ({"tune": {"seed": -1}}, "tune.seed is 0 or more: got -1"),
        ({"tune": {"epochs": 0}}, "tune.epochs is 1 or more: got 0"),
        ({"rates": [0.5, 0]}, "tune.rates .* above 0: got [0.5, 0]"),
        ({"rates": ["a"]}, "tune.rates .* above 0: got ['a']"),
        ({"rates": []}, "tune.rates .* above 0: got []"),
    ],
)
def test_refuses(change, pattern):
    pattern = re.escape(pattern).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with pytest.raises(UserError, match=pattern):
        trials(options(**change))


TRIALS = ran(
    **{"dp_x0.5": (0.7, 1.1), "dp_x1": (0.9, 0.6), "dp_x3": (0.9, 0.5)},
    **{"late_x0.5": (0.6, 0.2), "late_x1": (0.8, 0.3), "late_x3": (nan, nan)},
)


def test_the_best_has_the_best_metric_and_then_the_lowest_loss():
    rows = tried(options(), TRIALS, ACCURACY)
    assert [(row["rule"], row["lr"], row["best"]) for row in rows] == [
        ("dp", 0.05, False),
        ("dp", 0.1, False),
        ("dp", 0.3, True),
        ("late", 0.001, False),
        ("late", 0.002, True),
        ("late", 0.006, False),
    ]
    assert [row["accuracy"] for row in rows[:3]] == pytest.approx([70, 90, 90])
    assert with_best(options(), rows) == {
        "dp": {"optimizer": {"lr": 0.3}},
        "late": {"optimizer": NADAM | {"lr": 0.002}, "clip": 1.0},
    }
    (note,) = edge_notes(rows)
    assert note.startswith(
        "dp: the best of its rates, 0.3, is the highest that was tried"
    )


def test_language_models_are_tuned_by_their_loss():
    best = {
        row["rule"]: row["lr"] for row in tried(options(), TRIALS, LOSS) if row["best"]
    }
    assert best == {"dp": 0.3, "late": 0.001}


def test_the_lowest_rate_is_the_best_of_those_that_all_diverge():
    lost = ran(
        **{f"{rule}_x{k}": (nan, nan) for rule in ("dp", "late") for k in (2, 4)}
    )
    rows = tried(options([2, 4]), lost, ACCURACY)
    assert [row["lr"] for row in rows if row["best"]] == [0.2, 0.004]
    assert [note.partition(",")[0] for note in edge_notes(rows)] == [
        "dp: the best of its rates",
        "late: the best of its rates",
    ]


def test_a_single_rate_has_no_edge():
    rows = tried(options([1]), ran(dp_x1=(0.5, 1.0), late_x1=(0.5, 1.0)), ACCURACY)
    assert [row["best"] for row in rows] == [True, True]
    assert edge_notes(rows) == []

"""Rules of a comparison side by side: rows, labels and notes."""

from math import nan

import pytest

from toolkit.metric import ACCURACY
from toolkit.results.compared_rules import ComparedRules, batch_size_notes
from toolkit.results.comparison import RuleRun
from toolkit.schedule import catalog

SCHEDULES = {
    "dp": catalog.data_parallel(2),
    "late": catalog.cyclic(2, 1),
    "again": catalog.cyclic(2, 1),
}


def run(rule, seed, *accuracies, loss=1.0, notes=()):
    epochs = [
        {
            "epoch": k,
            "train_loss": loss,
            "top1": accuracy,
            "top5": 1.0,
            "test_loss": 0.5,
        }
        for k, accuracy in enumerate(accuracies)
    ]
    return RuleRun(rule, seed, epochs, delays=[], notes=[*notes])


def compared(**changes):
    runs = [run("dp", 0, 0.5, 0.8), run("late", 0, 0.4, 0.7, notes=["slow"])]
    arguments = {
        "schedules": SCHEDULES,
        "runs": runs,
        "measure": ACCURACY,
        "rates": {"dp": 0.1, "late": 0.05, "again": 0.1},
    }
    return ComparedRules(**arguments | changes)


def test_rows_are_compared_with_the_first_rule():
    row = compared().row("late")
    assert (row["rule"], row["schedule"], row["lr"]) == ("late", "CDP-v1", 0.05)
    assert row["accuracy"] == pytest.approx(70)
    assert row["difference"] == pytest.approx(-10)
    assert (row["staleness_mean"], row["staleness_max"], row["diverged"]) == (1, 1, 0)


def test_curves_are_those_of_a_rules_runs():
    assert compared().curves_of("dp") == [[pytest.approx(50), pytest.approx(80)]]
    assert compared().curves_of("again") == []


def test_equal_schedules_are_drawn_once_and_rules_of_one_name_get_labels():
    assert compared().labels["late"] == "CDP-v1 (late)"
    assert [schedule.name for schedule in compared().unlike_schedules()] == [
        "DP",
        "CDP-v1",
    ]


def test_notes_say_which_runs_have_diverged():
    runs = [run("dp", 0, 0.5), run("late", 3, 0.1, loss=nan), run("late", 4, 0.4)]
    (note,) = compared(runs=runs).notes()
    assert note.startswith("CDP-v1 (late): the loss diverged (seed 3 in epoch 0)")
    assert compared().notes() == ["slow"]


def test_rules_whose_steps_take_more_samples_are_noted():
    assert batch_size_notes(SCHEDULES, 8) == []
    more = {"dp": catalog.data_parallel(2), "wide": catalog.cyclic(4)}
    (note,) = batch_size_notes(more, 8)
    assert "(DP 16, CDP-v2 32)" in note

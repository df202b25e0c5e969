"""The best form of each rule on each kept data set."""

import json

from toolkit.results.best_rules import COMPARISONS, best_rules


def keep(folder, forms):
    """Write a kept comparison: (rule, schedule, accuracy, difference) of each form."""
    rows = [
        {
            "rule": rule,
            "schedule": schedule,
            "accuracy": accuracy,
            "difference": difference,
            "difference_95": 0.25,
            "verdict": f"verdict of {rule}",
        }
        for rule, schedule, accuracy, difference in forms
    ]
    folder.mkdir()
    result = {"schema": 1, "metrics": rows, "provenance": {}}
    (folder / "result.json").write_text(json.dumps(result))


def test_the_form_of_the_highest_accuracy_stands_for_its_rule(tmp_path):
    forms = [
        ("dp", "DP", 90.0, 0.0),
        ("dp_nesterov", "DP", 99.0, 9.0),
        ("cdp_v1", "CDP-v1", 85.0, -5.0),
        ("cdp_v1_predicted", "CDP-v1 predicted", 89.0, -1.0),
        ("cdp_v2", "CDP-v2", 88.5, -1.5),
        ("cdp_v2_nesterov", "CDP-v2", 91.0, 1.0),
        ("cdp_v2_predicted", "CDP-v2 predicted", 90.5, 0.5),
    ]
    for folder in COMPARISONS.values():
        keep(tmp_path / folder, forms)
    rows = best_rules(tmp_path)
    assert [row["data"] for row in rows] == list(COMPARISONS)
    assert rows[0] == {
        "data": "digits",
        "DP (%)": "90.00",
        "best CDP-v1": "Nesterov, predicted",
        "CDP-v1 - DP": "-1.00 ± 0.25",
        "CDP-v1 at the margin": "verdict of cdp_v1_predicted",
        "best CDP-v2": "Nesterov",
        "CDP-v2 - DP": "+1.00 ± 0.25",
        "CDP-v2 at the margin": "verdict of cdp_v2_nesterov",
    }


def test_a_rule_without_corrections_may_be_the_best(tmp_path):
    forms = [
        ("dp", "DP", 90.0, 0.0),
        ("cdp_v1", "CDP-v1", 91.0, 1.0),
        ("cdp_v1_nesterov", "CDP-v1", 89.0, -1.0),
        ("cdp_v2", "CDP-v2", 90.5, 0.5),
    ]
    for folder in COMPARISONS.values():
        keep(tmp_path / folder, forms)
    assert {row["best CDP-v1"] for row in best_rules(tmp_path)} == {"plain"}

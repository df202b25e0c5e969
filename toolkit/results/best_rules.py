"""The best form of each rule with late weights, on every kept data set."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.results.record import read_result

COMPARISONS = {
    "digits": "corrections",
    "Fashion-MNIST": "fashion_mnist",
    "CIFAR-10": "cifar10_corrections",
    "Imagenette": "imagenette_corrections_8",
}
"""Folder of the kept comparison of each data set, every rule at its own learning rate."""


def best_rules(results: Path) -> list[dict[str, str]]:
    """Return a row a data set: DP's accuracy, and the best form of CDP-v1 and of CDP-v2.

    The best form is the one with the highest mean test accuracy. Its difference from plain DP is
    in points, paired by seed, with a 95 % interval. The last column of a rule says what two
    one-sided t-tests at 5 % show at the margin of that comparison.

    Args:
        results: folder of the kept results.
    """
    rows = []
    for data, folder in COMPARISONS.items():
        metrics = read_result(results / folder)["metrics"]
        row = {"data": data, "DP (%)": f"{metrics[0]['accuracy']:.2f}"}
        for rule in ("CDP-v1", "CDP-v2"):
            forms = [form for form in metrics if form["schedule"].startswith(rule)]
            best_form = max(forms, key=lambda form: form["accuracy"])
            interval = (
                f"{best_form['difference']:+.2f} ± {best_form['difference_95']:.2f}"
            )
            row[f"best {rule}"] = _form_name(best_form)
            row[f"{rule} - DP"] = interval
            row[f"{rule} at the margin"] = best_form["verdict"]
        rows.append(row)
    return rows


def _form_name(form: Mapping[str, Any]) -> str:
    if "predicted" in form["rule"]:
        return "Nesterov, predicted"
    return "Nesterov" if form["rule"].endswith("nesterov") else "plain"

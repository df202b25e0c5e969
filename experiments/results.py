"""Put the kept results into their tables.

    python experiments/results.py [--check]

Between ``<!-- result: NAME -->`` and ``<!-- end -->``, README.md and the pages of results show
the table of experiments/results/NAME/result.json and its origin. --check only compares.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit import format as cells
from toolkit.cost.pipeline_table import pipeline_cells
from toolkit.cost.situations import situation_cells
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.plan.planner import plan_cells
from toolkit.results.provenance import strip_folders
from toolkit.results.record import read_result
from toolkit.results.tuning import edges
from toolkit.schedule import labels

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", *sorted(RESULTS.glob("*.md")))
_SHORT = "_short"  # ends the name of a table with some of a result's rows
_PLACE = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]
Rows = list[dict[str, Any]]


def rendered(page: str) -> str:
    """``page`` with every table as its result has it."""
    return _PLACE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", page)


def table(name: str) -> str:
    """The table of a kept result, and its origin."""
    result = read_result(RESULTS / name.removesuffix(_SHORT))
    _label(result["metrics"])
    rows = next(rows for prefix, rows in _ROWS if name.startswith(prefix))(result)
    found = result["provenance"]
    return (
        f"{cells.table(rows, 'github')}\n\n<sub>`{strip_folders(found['command'])}`, torch"
        f" {found['versions']['torch']}, {found['device']}, {found['seconds']:.0f} s, commit"
        f" {found['commit'][:10]}{_rates(result)}</sub>\n"
    )


def _label(rows: Rows) -> None:
    """Add the rule to the name of each schedule that several rules of a comparison share."""
    if all({"rule", "schedule"} <= {*row} for row in rows):
        called = labels({row["rule"]: row["schedule"] for row in rows})
        for row in rows:
            row["schedule"] = called[row["rule"]]


def _rates(result: Result) -> str:
    """How the learning rates of a comparison's rules were chosen; empty for other results."""
    config = result["provenance"]["config"]
    if "rules" not in config:
        return ""
    if tuning := result.get("tuning"):
        tune, called = config["tune"], {row["rule"]: row["schedule"] for row in result["metrics"]}
        ends = [f", the {end} for {called[rule]}" for rule, end in edges(tuning).items()]
        return (
            f"; each rule at the best of {len(tune['rates'])} learning rates, tried for"
            f" {tune['epochs']} epochs with seed {tune['seed']}{''.join(ends)}"
        )
    if any("optimizer" in own for own in (config.get("own") or {}).values()):
        return "; each rule with the optimizer that the command gives it"
    first = result["metrics"][0]["schedule"]
    return f"; every rule at {first}'s learning rate, optimizer.lr={config['optimizer']['lr']:g}"


def _each(*forms: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Result], Rows]:
    """A row of the table for each row of the metrics, with the cells of all ``forms``."""

    def rows(result: Result) -> Rows:
        return [{k: v for form in forms for k, v in form(r).items()} for r in result["metrics"]]

    return rows


def _compared(row: dict[str, Any], by: Metric = ACCURACY) -> dict[str, Any]:
    rule = {"rule": row["schedule"]} | (cells.rate_cells(row) if "lr" in row else {})
    return rule | cells.metric_cells(row, by, "DP") | cells.staleness_cells(row)


def _delays(result: Result) -> Rows:
    """Accuracies, and the effect of the delay on the gradients of the first and last stage."""
    name, rows = "cosine to the fresh gradient, first and last stage", []
    for row in result["metrics"]:
        cosines = [f"{d['cosine']:.2f}" for d in result["delays"] if d["rule"] == row["rule"]]
        rows.append(_compared(row) | {name: f"{cosines[0]}, {cosines[-1]}"})
    return rows


def _memory(result: Result) -> Rows:
    rows = []
    for axis in dict.fromkeys(row["axis"] for row in result["metrics"]):
        of_axis = [row for row in result["metrics"] if row["axis"] == axis]
        reductions = {row["workers"]: row["reduction"] for row in of_axis}
        limit = of_axis[0]["largest_reduction"]
        rows.append({"time axis": axis} | cells.reduction_cells(reductions, limit))
    return rows


def _least_peak(result: Result) -> Rows:
    return [cells.again_cells(row) for row in result["metrics"] if row["axis"] == "stages"]


def _tokens(row: dict[str, Any]) -> dict[str, Any]:
    return _compared(row, LOSS) | {"tokens right (%)": f"{row['accuracy']:.2f}"}


def _bench(row: dict[str, Any]) -> dict[str, Any]:
    return {k: "" if v is None else v for k, v in row.items() if k != "message"}


def _architecture(row: dict[str, Any]) -> dict[str, Any]:
    shown = {k: row[k] for k in ("library", "model", "graph", "larger stage")}
    found = {k: f"{v:.0e}" for k, v in row.items() if k == "difference" and isinstance(v, float)}
    return shown | {"difference": "", **found, "result": row["reason"] or "agrees"}


def _links(result: Result) -> Rows:
    """A row a method, without the rows on bars that older results have."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for row in (row for row in result["metrics"] if row.get("at most") is None):
        key = (row["workers"], row["method"])
        found = shown.setdefault(key, {"workers": key[0], "method": key[1]})
        found[row["link"]] = f"{row['/ DDP']:.2f}"
        if row["link"] == "unshaped":
            found["peak/mean, unshaped"] = row["peak/mean"] or ""
    return list(shown.values())


def _slept_links(result: Result) -> Rows:
    """A row a method: step times by that of DDP, and the simulator's error."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for row in result["metrics"]:
        key = (row["workers"], row["method"])
        found = shown.setdefault(key, {"workers": key[0], "method": key[1]})
        found[row["link"]] = f"{row['/ DDP']:.2f} ({row['error (%)']:+.1f} %)"
    return list(shown.values())


def _prediction_errors(result: Result) -> Rows:
    """The distribution of the errors of a plan's predictions."""
    rows = []
    for what, column in (("step time", "error (%)"), ("memory", "memory error (%)")):
        errors = sorted(abs(row[column]) for row in result["metrics"])
        row: dict[str, Any] = {"error of": what, "configurations": len(errors)}
        for share in (0.5, 0.75, 0.9, 1.0):
            name = "largest" if share == 1 else "median" if share == 0.5 else f"{share:.0%} below"
            row[f"{name} (%)"] = errors[max(0, round(share * len(errors)) - 1)]
        within = sum(error <= 10 for error in errors) / len(errors)
        rows.append(row | {"within 10 %": f"{within:.0%}"})
    return rows


def _situations_short(result: Result) -> Rows:
    """The rows without slow links, and those at M = C."""
    rows = [situation_cells(row) for row in result["metrics"]]
    return [{k: row[k] for k in row if k != "M/C"} for row in rows if row["M/C"] in ("0", "1")]


def _simulated(result: Result) -> Rows:
    """A row a schedule: its step time, and that time over the first's."""
    first = result["metrics"][0]["ms a step"]
    return [
        {
            "schedule": row["schedule"],
            "ms a step": f"{row['ms a step']:.1f}",
            "of the first": f"{row['ms a step'] / first:.2f}",
            "mean staleness": f"{row['mean staleness']:.2f}",
        }
        for row in result["metrics"]
    ]


def _limits(row: dict[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in row.items() if k != "kind"}


def _stable_rates(result: Result) -> Rows:
    rows: Rows = result["summary"]
    return [{k: v for k, v in row.items() if v != ""} for row in rows]


def _on_one_device(row: dict[str, Any]) -> dict[str, Any]:
    names = ("schedule", "GiB, fullest rank", "of it activations", "ms a step")
    return {name: row[name] for name in names}


def measured(row: dict[str, Any]) -> dict[str, Any]:
    return cells.measured_cells(row) | {"as counted": cells.agreement(row, "_measured")}


def counted(row: dict[str, Any]) -> dict[str, Any]:
    return cells.counted_cells(row) | {"as by formula": cells.agreement(row, "_formula")}


_ROWS: tuple[tuple[str, Callable[[Result], Rows]], ...] = (
    ("digits", _each(_compared, cells.peak_cells)),
    ("text", _each(_tokens)),
    ("delays", _delays),
    ("prediction_narrow", _each(_compared)),
    ("prediction", _delays),
    ("memory", _memory),
    ("least_peak", _least_peak),
    ("checkpointing", _each(_on_one_device)),
    ("activations", _each(_on_one_device)),
    ("communication_measured", _each(measured)),
    ("communication", _each(counted)),
    ("plan", _each(plan_cells)),
    ("pipelines", _each(pipeline_cells)),
    ("simulated", _simulated),
    (f"situations{_SHORT}", _situations_short),
    ("situations", _each(situation_cells)),
    ("stability_limits", _each(_limits)),
    ("stability", _stable_rates),
    ("bench_links_slept", _slept_links),
    ("bench_links", _links),
    ("bench_predictions", _prediction_errors),
    ("bench_architectures", _each(_architecture)),
    ("bench", _each(_bench)),
    ("", _each(_compared)),
)
"""The rows of a result by how its name begins; the first that fits."""


def main() -> None:
    for page in PAGES:
        before = page.read_text()
        after = rendered(before)
        if "--check" not in sys.argv:
            page.write_text(after)
        elif before != after:
            name = page.relative_to(ROOT)
            sys.exit(f"{name} differs from experiments/results: run python experiments/results.py")


if __name__ == "__main__":
    main()

"""Put the kept results into their tables.

    python experiments/results.py [--check]

Between ``<!-- result: NAME -->`` and ``<!-- end -->``, README.md and the pages of results show
the table of experiments/results/NAME/result.json and its origin. --check only compares.
"""

import re
import sys
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from toolkit import format as cells
from toolkit.cost.pipeline_table import pipeline_cells
from toolkit.cost.situations import model_cells, situation_cells
from toolkit.cost.slow_links import slow_link_table
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.plan.plan_table import plan_cells
from toolkit.results.best_rules import best_rules
from toolkit.results.provenance import strip_folders
from toolkit.results.record import read_result
from toolkit.results.time_to_accuracy import accuracy_table
from toolkit.results.tuning import edges
from toolkit.schedule import labels

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", *sorted(RESULTS.glob("*.md")))
_SHORT = "_short"  # ends the name of a table with some of a result's rows
# Names the table of several comparisons, each rule at its own rate.
_BEST_RULES = f"best_rules{_SHORT}"
_PLACE = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Result = dict[str, Any]
Row = dict[str, Any]
Rows = list[Row]


def rendered(page: str) -> str:
    """Return ``page`` with every table as its result has it."""

    def fill(place: re.Match[str]) -> str:
        start, name, end = place.groups()
        return f"{start}{table(name)}\n{end}"

    return _PLACE.sub(fill, page)


def table(name: str) -> str:
    """Return the table of a kept result, and its origin."""
    if name == _BEST_RULES:
        return f"{cells.table(best_rules(RESULTS), 'github')}\n"
    result = read_result(RESULTS / name.removesuffix(_SHORT))
    _label(result["metrics"])
    make_rows = next(make for prefix, make in _ROWS if name.startswith(prefix))
    source = result["provenance"]
    origin = (
        f"`{strip_folders(source['command'])}`, torch {source['versions']['torch']},"
        f" {source['device']}, {source['seconds']:.0f} s, commit {source['commit'][:10]}"
    )
    rows = make_rows(result)
    return f"{cells.table(rows, 'github')}\n\n<sub>{origin}{_rates(result)}</sub>\n"


def _label(rows: Rows) -> None:
    """Add the rule to the name of each schedule that several rules of a comparison share."""
    if all({"rule", "schedule"} <= {*row} for row in rows):
        label_of_rule = labels({row["rule"]: row["schedule"] for row in rows})
        for row in rows:
            row["schedule"] = label_of_rule[row["rule"]]


def _rates(result: Result) -> str:
    """Say how the learning rates of a comparison's rules were chosen; empty for other results."""
    config = result["provenance"]["config"]
    if "rules" not in config:
        return ""
    if tuning := result.get("tuning"):
        tune = config["tune"]
        label_of_rule = {row["rule"]: row["schedule"] for row in result["metrics"]}
        ends = [
            f", the {end} for {label_of_rule[rule]}"
            for rule, end in edges(tuning).items()
        ]
        return (
            f"; each rule at the best of {len(tune['rates'])} learning rates, tried for"
            f" {tune['epochs']} epochs with seed {tune['seed']}{''.join(ends)}"
        )
    if any("optimizer" in own for own in (config.get("own") or {}).values()):
        return "; each rule with the optimizer that the command gives it"
    baseline = result["metrics"][0]["schedule"]
    return f"; every rule at {baseline}'s learning rate, optimizer.lr={config['optimizer']['lr']:g}"


def _each(*make_cells: Callable[[Row], Row]) -> Callable[[Result], Rows]:
    """Return a function that makes a row of cells for each row of the metrics."""

    def rows(result: Result) -> Rows:
        table_rows = []
        for row in result["metrics"]:
            table_row: Row = {}
            for make in make_cells:
                table_row |= make(row)
            table_rows.append(table_row)
        return table_rows

    return rows


def _compared(row: Row, measure: Metric = ACCURACY) -> Row:
    rule = {"rule": row["schedule"]} | (cells.rate_cells(row) if "lr" in row else {})
    return rule | cells.metric_cells(row, measure, "DP") | cells.staleness_cells(row)


def _tuned_rates(result: Result) -> Rows:
    """A row a rule: rates by those of the first rule, and how far delay turns its gradients."""
    rows = []
    for row in result["metrics"]:
        rows.append(
            {
                "rule": row["rule"],
                "tuned rate": f"{row['tuned']:g}",
                "largest stable rate": f"{row['certified']:.2g}",
                "tuned / DP": f"{row['tuned / first']:.2f}",
                "stable / DP": f"{row['certified / first']:.2f}",
                "mean cosine": f"{row['cosine']:.2f}",
            }
        )
    return rows


def _delays(result: Result) -> Rows:
    """Accuracies, and the effect of the delay on the gradients of the first and last stage."""
    column = "cosine to the fresh gradient, first and last stage"
    rows = []
    for row in result["metrics"]:
        cosines = [
            delay["cosine"]
            for delay in result["delays"]
            if delay["rule"] == row["rule"]
        ]
        rows.append(_compared(row) | {column: f"{cosines[0]:.2f}, {cosines[-1]:.2f}"})
    return rows


def _memory(result: Result) -> Rows:
    """A row a time axis."""
    rows_of_axis: dict[str, Rows] = {}
    for row in result["metrics"]:
        rows_of_axis.setdefault(row["axis"], []).append(row)
    rows = []
    for axis, axis_rows in rows_of_axis.items():
        reductions = {row["workers"]: row["reduction"] for row in axis_rows}
        limit = axis_rows[0]["largest_reduction"]  # of infinitely many workers
        rows.append({"time axis": axis} | cells.reduction_cells(reductions, limit))
    return rows


def _least_peak(result: Result) -> Rows:
    return [
        cells.again_cells(row) for row in result["metrics"] if row["axis"] == "stages"
    ]


def _tokens(row: Row) -> Row:
    return _compared(row, LOSS) | {"tokens right (%)": f"{row['accuracy']:.2f}"}


def _bench(row: Row) -> Row:
    return {
        column: "" if cell is None else cell
        for column, cell in without(row, "message").items()
    }


def _architecture(row: Row) -> Row:
    table_row = {
        column: row[column] for column in ("library", "model", "graph", "larger stage")
    }
    difference = row.get("difference")
    table_row["difference"] = (
        f"{difference:.0e}" if isinstance(difference, float) else ""
    )
    return table_row | {"result": row["reason"] or "agrees"}


def _by_method(rows: Rows) -> dict[tuple[int, str], Row]:
    """Return the begin of a table row by workers and method."""
    return {
        (row["workers"], row["method"]): {
            "workers": row["workers"],
            "method": row["method"],
        }
        for row in rows
    }


def _links(result: Result) -> Rows:
    """A row a method, without the rows on bars that older results have."""
    rows = [row for row in result["metrics"] if row.get("at most") is None]
    table_rows = _by_method(rows)
    for row in rows:
        table_row = table_rows[row["workers"], row["method"]]
        table_row[row["link"]] = f"{row['/ DDP']:.2f}"
        if row["link"] == "unshaped":
            table_row["peak/mean, unshaped"] = row["peak/mean"] or ""
    return [*table_rows.values()]


def _slept_links(result: Result) -> Rows:
    """A row a method: step times by that of DDP, and the simulator's error."""
    table_rows = _by_method(result["metrics"])
    for row in result["metrics"]:
        cell = f"{row['/ DDP']:.2f} ({row['error (%)']:+.1f} %)"
        table_rows[row["workers"], row["method"]][row["link"]] = cell
    return [*table_rows.values()]


def _prediction_errors(result: Result) -> Rows:
    """The distribution of the errors of a plan's predictions."""
    rows = []
    shares = {"median": 0.5, "75% below": 0.75, "90% below": 0.9, "largest": 1.0}
    for quantity, column in (
        ("step time", "error (%)"),
        ("memory", "memory error (%)"),
    ):
        errors = sorted(abs(row[column]) for row in result["metrics"])
        row: Row = {"error of": quantity, "configurations": len(errors)}
        for name, share in shares.items():
            row[f"{name} (%)"] = errors[max(0, round(share * len(errors)) - 1)]
        within = sum(error <= 10 for error in errors) / len(errors)
        rows.append(row | {"within 10 %": f"{within:.0%}"})
    # Whether the faster of two candidates is predicted to be the faster one.
    predicted = [row["predicted ms"] for row in result["metrics"]]
    measured = [row["measured ms"] for row in result["metrics"]]
    rows[0]["Kendall's tau"] = round(_kendalls_tau(predicted, measured), 3)
    return rows


def _kendalls_tau(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Return the share of pairs in the same order, minus that of pairs in opposite orders."""
    n_same = n_opposite = 0
    candidates = zip(predicted, measured, strict=True)
    for first, second in combinations(candidates, 2):
        product = (second[0] - first[0]) * (second[1] - first[1])
        n_same += product > 0  # a tie counts as neither
        n_opposite += product < 0
    return (n_same - n_opposite) / (n_same + n_opposite)


def _slow_links(result: Result) -> Rows:
    return slow_link_table(result["compressed"])


def _situations_short(result: Result) -> Rows:
    """The models on machines."""
    rows = []
    for row in result["models"]:
        cells_of_row = model_cells(row)
        steps = cells_of_row.pop("M/C")
        words = f"{steps} steps"
        rows.append(
            {
                "model, samples of a worker": cells_of_row.pop("model"),
                "machines": cells_of_row.pop("machine"),
                "all parameters cross a link in": words,
            }
            | cells_of_row
        )
    return rows


def _papers(result: Result) -> Rows:
    """A row for each paper and quantity: how many values are reproduced."""
    groups: dict[tuple[str, str], Rows] = {}
    for row in result["metrics"]:
        groups.setdefault((row["paper"], row["what"]), []).append(row)
    rows = []
    for (paper, quantity), group in groups.items():
        n_equal = sum(not _differs(row) for row in group)
        largest = max(abs(row["difference"]) for row in group)
        row = {"paper": paper, "what": quantity, "values": len(group), "equal": n_equal}
        rows.append(row | {"largest difference": f"{largest:.4f}"})
    return rows


def _papers_short(result: Result) -> Rows:
    """The values that differ, and why."""
    columns = ("paper", "method", "setting", "published", "ours", "note")
    return [
        {name: row[name] for name in columns}
        for row in result["metrics"]
        if _differs(row)
    ]


def _rate(row: Row) -> Row:
    """A published rate of a training, and ours."""
    rates: Row = {"paper": row["paper"], "setting": row["setting"]}
    rates["published, TFLOP/s a device"] = f"{row['published']:.0f}"
    rates["simulated"] = f"{row['ours']:.0f}"
    rates["error (%)"] = f"{100 * row['difference'] / row['published']:+.0f}"
    return rates


def _differs(row: Row) -> bool:
    return abs(row["difference"]) > max(1e-4, 0.005 * abs(row["published"]))


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


def _limits(row: Row) -> Row:
    return {
        column: f"{cell:.2f}" if isinstance(cell, float) else cell
        for column, cell in without(row, "kind").items()
    }


def without(row: Row, column: str) -> Row:
    """Return ``row`` without one of its columns."""
    return {name: cell for name, cell in row.items() if name != column}


def _stable_rates(result: Result) -> Rows:
    rows: Rows = result["summary"]
    return [
        {column: cell for column, cell in row.items() if cell != ""} for row in rows
    ]


def _on_one_device(row: Row) -> Row:
    names = ("schedule", "GiB, fullest rank", "of it activations", "ms a step")
    return {name: row[name] for name in names}


def measured(row: Row) -> Row:
    return cells.measured_cells(row) | {"as counted": cells.agreement(row, "_measured")}


def counted(row: Row) -> Row:
    return cells.counted_cells(row) | {
        "as by formula": cells.agreement(row, "_formula")
    }


def _times_to_accuracy(result: Result) -> Rows:
    return accuracy_table(result["accuracies"])


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
    ("papers_rates", _each(_rate)),  # before "papers", which also begins it
    (f"papers{_SHORT}", _papers_short),
    ("papers", _papers),
    ("simulated", _simulated),
    ("slow_links", _slow_links),
    ("time_to_accuracy", _times_to_accuracy),
    (f"situations{_SHORT}", _situations_short),
    ("situations", _each(situation_cells)),
    ("stability_limits", _each(_limits)),
    ("stability_imagenette", _tuned_rates),
    ("stability", _stable_rates),
    ("bench_links_slept", _slept_links),
    ("bench_links", _links),
    ("bench_predictions", _prediction_errors),
    ("bench_architectures", _each(_architecture)),
    ("bench", _each(_bench)),  # benches without a table of their own
    ("", _each(_compared)),  # all other names: comparisons of rules
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
            sys.exit(
                f"{name} differs from experiments/results: run python experiments/results.py"
            )


if __name__ == "__main__":
    main()

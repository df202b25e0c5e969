"""Put the kept results into their tables: python experiments/results.py [--check]

Between ``<!-- result: NAME -->`` and ``<!-- end -->`` README.md and experiments/results/README.md
show the table of experiments/results/NAME/result.json, and how it came about. --check only says
whether they do.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from toolkit.format import (
    agreement,
    counted_cells,
    measured_cells,
    metric_cells,
    peak_cells,
    pipeline_cells,
    reduction_cells,
    staleness_cells,
)
from toolkit.format import (
    table as format_table,
)
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.provenance import strip_folders

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
PAGES = (ROOT / "README.md", RESULTS / "README.md")
_PLACE = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """``page`` with every table as its result has it."""
    return _PLACE.sub(lambda found: f"{found[1]}{table(found[2])}\n{found[3]}", page)


def table(name: str) -> str:
    """The table of a kept result, and its origin."""
    result = json.loads((RESULTS / name / "result.json").read_text())
    rows = _ROWS[name](result)
    return f"{format_table(rows, 'github')}\n\n{origin(result['provenance'])}\n"


def origin(found: dict[str, Any]) -> str:
    command = strip_folders(found["command"])
    return (
        f"<sub>`{command}`, torch {found['versions']['torch']}, {found['device']},"
        f" {found['seconds']:.0f} s, commit {(found['commit'] or 'unknown')[:10]}</sub>"
    )


def _accuracy(result: dict[str, Any], by: Metric = ACCURACY) -> list[dict[str, str]]:
    return [
        {"rule": row["schedule"]} | metric_cells(row, by, "DP") | staleness_cells(row)
        for row in result["metrics"]
    ]


def _losses(result: dict[str, Any]) -> list[dict[str, str]]:
    """Of a language model: losses, and how many tokens were the likeliest."""
    rows = _accuracy(result, LOSS)
    for row, metric in zip(rows, result["metrics"], strict=True):
        row["tokens right (%)"] = f"{metric['accuracy']:.2f}"
    return rows


def _digits(result: dict[str, Any]) -> list[dict[str, str]]:
    """Accuracies, and what the schedules hold and send."""
    rows = _accuracy(result)
    for row, metric in zip(rows, result["metrics"], strict=True):
        row |= peak_cells(metric)
    return rows


def _delays(result: dict[str, Any]) -> list[dict[str, str]]:
    """Accuracies, and of the first and the last stage what the delay did to the gradients."""
    rows = _accuracy(result)
    for row, metric in zip(rows, result["metrics"], strict=True):
        stages = [delay for delay in result["delays"] if delay["rule"] == metric["rule"]]
        cosines = [stages[k]["cosine"] for k in (0, -1)]
        row["cosine to the fresh gradient, first and last stage"] = "{:.2f}, {:.2f}".format(
            *cosines
        )
    return rows


def _memory(result: dict[str, Any]) -> list[dict[str, str]]:
    rows = result["metrics"]
    limits = {row["axis"]: row["largest_reduction"] for row in rows}
    by_axis = {
        axis: {row["workers"]: row["reduction"] for row in rows if row["axis"] == axis}
        for axis in limits
    }
    return [
        {"time axis": axis} | reduction_cells(by_axis[axis], limit)
        for axis, limit in limits.items()
    ]


def _on_one_device(result: dict[str, Any]) -> list[dict[str, Any]]:
    columns = ("schedule", "GiB, fullest rank", "of it activations", "ms a step")
    return [{column: row[column] for column in columns} for row in result["metrics"]]


def _counted(result: dict[str, Any]) -> list[dict[str, str]]:
    """Of every setting under each rule: its footprint, and whether it is the closed form's."""
    return [
        counted_cells(row) | {"as by formula": agreement(row, "_formula")}
        for row in result["metrics"]
    ]


def _measured(result: dict[str, Any]) -> list[dict[str, str]]:
    return [
        measured_cells(row) | {"as counted": agreement(row, "_measured")}
        for row in result["metrics"]
    ]


def _pipelines(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [pipeline_cells(row) for row in result["metrics"]]


def _bench(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: "" if v is None else v for k, v in row.items()} for row in result["metrics"]]


def _failure(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "message"} for row in result["metrics"]]


def _links(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a method; what is held to a bar has rows of its own, which are left out."""
    shown: dict[tuple[int, str], dict[str, Any]] = {}
    for row in (row for row in result["metrics"] if row["at most"] is None):
        key = (row["workers"], row["method"])
        found = shown.setdefault(key, {"workers": key[0], "method": key[1]})
        found[row["link"]] = f"{row['/ DDP']:.2f}"
        if row["link"] == "unshaped":
            found["peak/mean, unshaped"] = row["peak/mean"] or ""
    return list(shown.values())


_ROWS = {
    "digits": _digits,
    "cifar10_long_8": _accuracy,
    "cifar10_long_4": _accuracy,
    "cifar10_narrow_8": _accuracy,
    "cifar10_narrow_4": _accuracy,
    "imagenette_narrow_8": _accuracy,
    "imagenette_warm_8": _accuracy,
    "imagenette_long_8": _accuracy,
    "imagenette50_narrow_8": _accuracy,
    "text": _losses,
    "text_low": _losses,
    "text_muon": _losses,
    "text_nadam": _losses,
    "delays": _delays,
    "prediction": _delays,
    "prediction_narrow_8": _accuracy,
    "memory_resnet50": _memory,
    "memory_vit_b_16": _memory,
    "checkpointing_none": _on_one_device,
    "checkpointing_all": _on_one_device,
    "activations_none": _on_one_device,
    "activations_all": _on_one_device,
    "communication": _counted,
    "communication_measured": _measured,
    "pipelines": _pipelines,
    "bench_grouped": _bench,
    "bench_failure": _failure,
    "bench_links": _links,
    "bench_simulator": _bench,
    "bench_resume": _bench,
    "bench_resume_distributed": _bench,
    "bench_resume_restarted": _bench,
    "bench_checkpoint_fuzz": _failure,
}


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

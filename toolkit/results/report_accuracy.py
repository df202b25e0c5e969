"""The section of a report on accuracy: curves, final metrics, and the delay's effect."""

from collections import Counter
from collections.abc import Iterator, Sequence
from math import isfinite, nan
from statistics import mean
from typing import Any

from toolkit.format import metric_cells, plus_minus
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.collect import RunGroup, Tasks, each_group, flat_options
from toolkit.results.report_page import Block, Figure, Table, Text
from toolkit.results.statistics import delay_means, over_seeds

_CURVES = 7  # lines in one figure
_CURVES_SIZE = (8.2, 3.2)  # inches
_EQUIVALENCE = (
    " At a margin: whether the difference is shown to be smaller than that, by two one-sided paired"
    " t-tests at 5 %, whose larger p-value is p."
)
_EMULATED = (
    " One process emulates all workers (runtime=single_process): its samples/s say nothing about a"
    " rule's speed on many devices."
)


def accuracy_blocks(tasks: Tasks, margin: float | None) -> Iterator[Block]:
    """Yield the curves and final metrics of each task, and the delay diagnostics."""
    has_finished = False
    for task, groups in tasks.items():
        trained = [group for group in groups if group.by_seed or group.n_diverged]
        if any(group.by_seed for group in trained):
            has_finished = True
            yield from _curves(task, trained)
            yield _final_metrics(task, trained, margin)
    if not has_finished:
        yield Text("No run has finished with an accuracy.")
    delay_rows = _delays(tasks)
    if delay_rows:
        yield Table(
            delay_rows,
            "What the delay does to the gradients, mean over the steps looked into: how many steps"
            " late the weights were, the cosine between the gradient used and the fresh one, and"
            " how far a step moves the weights by their own size.",
        )


def _curves(task: str, groups: Sequence[RunGroup]) -> Iterator[Figure]:
    """Yield the curves of a task's groups; runs of another length than most are left out."""
    from toolkit.figures.curves_figure import over_epochs

    metric = groups[0].runs[0].judged_by
    curves = {}
    for group in groups:
        finite_runs = []
        for run in group.by_seed.values():
            values = [epoch.get(metric.key, nan) for epoch in run.epochs]
            if values and all(map(isfinite, values)):
                finite_runs.append(values)
        if finite_runs:
            # Curves are drawn with the mean of all runs, which have to be equally long for that.
            ((usual_length, _),) = Counter(map(len, finite_runs)).most_common(1)
            curves[group.label] = [
                run for run in finite_runs if len(run) == usual_length
            ]
    labels = [*curves]
    for start in range(0, len(labels), _CURVES):
        drawn_curves = {
            label: curves[label] for label in labels[start : start + _CURVES]
        }
        last_values = []
        for label, runs in drawn_curves.items():
            last_mean = mean(run[-1] for run in runs)
            last_values.append(
                f"{label} {last_mean:.{metric.decimals - 1}f} {metric.unit}"
            )
        figure = over_epochs(drawn_curves, metric)
        figure.set_size_inches(_CURVES_SIZE)
        yield Figure(
            figure,
            f"{task}: test {metric.name} after each epoch, mean over seeds and the band they span.",
            f"Line chart of test {metric.name} over epochs, {task}; at the end"
            f" {', '.join(last_values)}.",
        )


def _final_metrics(
    task: str, groups: Sequence[RunGroup], margin: float | None
) -> Table:
    """Return the table of the metrics after the last epoch, without its empty columns."""
    metric = groups[0].runs[0].judged_by
    baselines = [group.baseline(groups) for group in groups]
    baseline_labels = {baseline.label for baseline in baselines}
    first = "the first rule with these options"
    if len(baseline_labels) == 1:
        (first,) = baseline_labels
    # The margin that the comparisons state counts if they agree on one.
    if margin is None:
        stated_margins = set()
        for group in groups:
            stated_margins |= {run.config.get("margin") for run in group.runs}
        stated_margins -= {None}
        if len(stated_margins) == 1:
            (margin,) = stated_margins
    equivalence = ""
    if margin is not None:
        equivalence = _EQUIVALENCE
    emulated = ""
    runtimes = {flat_options(group.runs[0].config).get("runtime") for group in groups}
    if "SingleProcess" in runtimes:
        emulated = _EMULATED
    rows = []
    for group, baseline in zip(groups, baselines, strict=True):
        difference = difference_row(group, baseline, metric, margin)
        cells = metric_cells(difference, metric, first)
        rows.append(
            {"rule": group.label, "seeds": _seeds(group)}
            | cells
            | _other_means(group, metric)
        )
    # A column of dashes says nothing, such as a spread where each rule has one seed.
    for heading in [*rows[0]]:
        if all(row[heading] == "-" for row in rows):
            for row in rows:
                del row[heading]
    return Table(
        rows,
        f"{task}: test {metric.name} after the last epoch, mean ± standard deviation over seeds,"
        f" and the difference from {first}, paired by seed, in {metric.unit_of_differences}, ± its"
        " 95 % interval. A single seed has neither: a difference may be chance. A seed that ran"
        f" twice counts as it ran last.{equivalence}{emulated}",
    )


def difference_row(
    group: RunGroup, baseline: RunGroup, by: Metric, margin: float | None
) -> dict[str, Any]:
    """Return the row of :func:`over_seeds` of the last epoch; NaN where no seed is in both."""
    values = _last_metrics(group, by)
    baseline_values = _last_metrics(baseline, by)
    if not values.keys() & baseline_values.keys():
        baseline_values = dict.fromkeys(values, nan)
    return over_seeds(values, baseline_values, by, margin)


def _last_metrics(group: RunGroup, by: Metric) -> dict[int, float]:
    """Return the last test metric by seed; NaN, of no seed, if no run has ended."""
    return {
        seed: run.metrics.get(by.key, nan) for seed, run in group.by_seed.items()
    } or {-1: nan}


def _seeds(group: RunGroup) -> str:
    seeds = ", ".join(map(str, group.by_seed)) or "none"
    if group.n_diverged:
        seeds += f" ({group.n_diverged} diverged)"
    return seeds


def _other_means(group: RunGroup, by: Metric) -> dict[str, str]:
    """Return the mean of the metric other than ``by``, and of the speed."""
    metric = LOSS
    if by is LOSS:
        metric = ACCURACY
    metrics = [run.metrics for run in group.by_seed.values()] or [{}]
    metric_mean = mean(row.get(metric.key, nan) for row in metrics)
    speed = mean(row.get("samples_per_second", nan) for row in metrics)
    return {
        f"test {metric.name} ({metric.unit})": plus_minus(
            metric_mean, None, decimals=metric.decimals
        ),
        "samples/s": plus_minus(speed, None, decimals=0),
    }


def _delays(tasks: Tasks) -> list[dict[str, str]]:
    """Return a row for each rule and stage on what the delay does to the gradients."""
    delays = []
    for task, group in each_group(tasks):
        # Runs of one comparison share a folder and its delays.
        run_of_folder = {run.folder: run for run in group.by_seed.values()}
        for run in run_of_folder.values():
            for row in run.delays:
                if "stage" in row:
                    delays.append({"training": task, "rule": group.label} | row)
    return [
        {
            "training": row["training"],
            "rule": row["rule"],
            "stage": f"{row['stage']:.0f}",
            "steps late": f"{row['delay']:.2f}",
            "cosine": f"{row['cosine']:.3f}",
            "moved": f"{100 * row['moved'] / (row['weights'] or nan):.2f} %",
        }
        for row in delay_means(delays, ["training", "rule", "stage"])
    ]

"""A report on runs: summary, accuracy, memory, communication and commands."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite, isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

from toolkit.format import count, metric_cells, plus_minus
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.collect import (
    PRINCIPAL,
    RunGroup,
    Tasks,
    each_group,
    flat_options,
    group_runs,
)
from toolkit.results.provenance import strip_folders
from toolkit.results.report_page import (
    Block,
    Command,
    Figure,
    Report,
    Table,
    Text,
    map_texts,
)
from toolkit.results.report_schedules import (
    communication_blocks,
    memory_blocks,
    rebuild_all,
)
from toolkit.results.runs import MESSAGES, Run
from toolkit.results.statistics import (
    check_margin,
    delay_means,
    in_a_sentence,
    over_seeds,
)

_CURVES = 7  # lines in one figure
_CURVES_SIZE = (8.2, 3.2)  # inches
_MOST_VALUES = 4  # of an option
_EQUIVALENCE = (
    " At a margin: whether the difference is shown to be smaller than that, by two one-sided paired"
    " t-tests at 5 %, whose larger p-value is p."
)
_EMULATED = (
    " One process emulates all workers (runtime=single_process): its samples/s say nothing about a"
    " rule's speed on many devices."
)


def build_report(
    runs: Sequence[Run], title: str | None = None, margin: float | None = None
) -> Report:
    """Return the report on ``runs``; what cannot be shown is named and left out.

    It can be passed on: its folders are relative to this one, or to the folder of all runs.

    Args:
        runs: as :func:`toolkit.results.runs.read_runs` returns them.
        title: title of the report; by default it names the rules, models and data.
        margin: largest difference that does not matter, in points or nats; by default the margin
            of the comparisons, if they state one.

    Raises:
        UserError: the margin is not above 0.
    """
    check_margin(margin)
    tasks = group_runs(runs)
    schedules, left_out = rebuild_all(tasks)
    report = Report(
        title or _title(tasks),
        {
            "Summary": [*_conclusions(tasks, margin), *_summary(runs, tasks)],
            "Accuracy": [*_accuracy(tasks, margin)],
            "Memory": [*left_out, *memory_blocks(schedules)],
            "Communication": [*communication_blocks(tasks, schedules)],
            "Reproduce": [*_commands(runs)],
        },
    )
    prefixes = _machine_prefixes(runs)

    def without_machine(text: str) -> str:
        for prefix, replacement in prefixes.items():
            text = text.replace(prefix, replacement)
        return text

    return map_texts(report, without_machine)


def _title(tasks: Tasks) -> str:
    """Return a title that names the rules, and the models with their data."""
    if not tasks:
        return "Runs compared"
    rules = dict.fromkeys(
        group.runs[0].schedule or group.label for _, group in each_group(tasks)
    )
    return f"{_list([*rules])}: {_list([*tasks])}"


def _list(words: Sequence[str]) -> str:
    """Return the words as a list in a sentence; of many only the first."""
    if len(words) > _MOST_VALUES:
        words = [*words[: _MOST_VALUES - 1], f"{len(words) - _MOST_VALUES + 1} more"]
    *first_words, last_word = words
    return f"{', '.join(first_words)} and {last_word}" if first_words else last_word


def _machine_prefixes(runs: Sequence[Run]) -> dict[str, str]:
    """Return what replaces the folders of this machine in texts: its own folders first."""
    replacements = {Path.cwd(): ""}
    if runs:
        folders = [run.folder.absolute() for run in runs]
        replacements[Path(os.path.commonpath(folders)).parent] = ""
    replacements[Path.home()] = "~/"
    replacements.pop(Path("/"), None)
    return {f"{folder}/": replacement for folder, replacement in replacements.items()}


def _conclusions(tasks: Tasks, margin: float | None) -> Iterator[Text]:
    """Yield a sentence on each rule, compared with the baseline of its task."""
    for task, group in each_group(tasks):
        baseline = group.baseline(tasks[task])
        metric = group.runs[0].judged_by
        row = _difference(group, baseline, metric, margin)
        if group is not baseline and not isnan(row[metric.columns[2]]):
            n_runs = len(group.by_seed)
            sentence = in_a_sentence(
                group.label, baseline.label, row, n_runs, metric, margin
            )
            yield Text(f"{task}, test {metric.name}: {sentence}")


def _summary(runs: Sequence[Run], tasks: Tasks) -> Iterator[Block]:
    """Yield the tables of what was trained, of the runs left out, and of their notes."""
    yield Text(f"{count(len(runs), 'run')}: {_states(runs)}.")
    rows = [_training(task, groups) for task, groups in tasks.items()]
    if rows:
        yield Table(rows, "What was trained.")
    left_out = [_left_out(run) for run in runs if not run.counts]
    if left_out:
        yield Table(left_out, "Left out of the tables and figures below, and why.")
    notes: dict[tuple[str, str], None] = {}  # runs of a comparison have the same ones
    for run in runs:
        notes |= dict.fromkeys((str(run.folder), note) for note in run.notes)
    if notes:
        note_rows = [{"folder": folder, "note": note} for folder, note in notes]
        yield Table(note_rows, "Notes of the runs.")


def _training(task: str, groups: Sequence[RunGroup]) -> dict[str, str]:
    """Return the row of a task: its rules, options, seeds and states."""
    options_of_groups = [flat_options(group.runs[0].config) for group in groups]
    runs: list[Run] = []
    for group in groups:
        runs += group.runs
    row = {"training": task, "rules": ", ".join(group.label for group in groups)}
    for option in PRINCIPAL[2:]:
        row[option] = _few([options.get(option) for options in options_of_groups])
    seeds = {run.seed for run in runs if run.seed is not None}
    return row | {"seeds": _few(sorted(seeds)), "states": _states(runs)}


def _few(values: Sequence[object]) -> str:
    """Return the different values, or their number if there are many."""
    texts = dict.fromkeys(map(_text, values))
    if len(texts) > _MOST_VALUES:
        return f"{len(texts)} values"
    return ", ".join(texts)


def _text(value: object) -> str:
    """Return a cell of a table; a dash for None."""
    if value is None:
        return "-"
    return str(value)


def _states(runs: Sequence[Run]) -> str:
    """Return the number of runs in each state."""
    states = Counter(run.state for run in runs)
    return ", ".join(f"{states[state]} {state}" for state in MESSAGES if states[state])


def _left_out(run: Run) -> dict[str, str]:
    """Return the row of a run without a final result, with the reason."""
    usual_reason = "no training"
    if run.trains:
        usual_reason = "its result lacks the final accuracy or the schedule"
    return {
        "folder": str(run.folder),
        "experiment": run.kind,
        "state": run.state,
        "reason": run.message or usual_reason,
        "rule": run.schedule or run.rule or "-",
        "seed": _text(run.seed),
    }


def _accuracy(tasks: Tasks, margin: float | None) -> Iterator[Block]:
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
        difference = _difference(group, baseline, metric, margin)
        cells = metric_cells(difference, metric, first)
        rows.append(
            {"rule": group.label, "seeds": _seeds(group)}
            | cells
            | _other_means(group, metric)
        )
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


def _difference(
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


def _commands(runs: Sequence[Run]) -> Iterator[Block]:
    """Yield each command once, with the runs that it made and where they ran."""
    folders_of_command: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        command = run.provenance.get("command")
        if isinstance(command, str):
            key = strip_folders(command), _origin(run.provenance)
            folders_of_command.setdefault(key, []).append(str(run.folder))
    if not folders_of_command:
        yield Text("No run has a command.")
    for (command, origin), folders in folders_of_command.items():
        first_folder, *other_folders = dict.fromkeys(folders)
        place = first_folder
        if other_folders:
            place += f" and {len(other_folders)} more"
        yield Command(command, f"{count(len(folders), 'run')} in {place}; {origin}")


def _origin(provenance: Mapping[str, Any]) -> str:
    """Return the commit, versions and device of a run."""
    # + if changed since.
    commit, change_mark, _ = str(provenance.get("commit")).partition("+")
    versions = provenance.get("versions") or {}
    words = [f"commit {commit[:10]}{change_mark}"]
    words += [f"{package} {version}" for package, version in versions.items()]
    return ", ".join([*words, str(provenance.get("device"))])

"""A report on runs: summary, accuracy, memory, communication and commands."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from toolkit.format import count
from toolkit.results.collect import (
    PRINCIPAL,
    RunGroup,
    Tasks,
    each_group,
    flat_options,
    group_runs,
)
from toolkit.results.provenance import strip_folders
from toolkit.results.report_accuracy import accuracy_blocks, difference_row
from toolkit.results.report_page import (
    Block,
    Command,
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
    in_a_sentence,
)

_MOST_VALUES = 4  # of an option


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
            "Accuracy": [*accuracy_blocks(tasks, margin)],
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
    # An inner folder comes before the one around it, and the home folder is often around both.
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
        row = difference_row(group, baseline, metric, margin)
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

"""Runs as tables, a row per run or per epoch, and as groups that can be compared."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.files import CONSOLE
from toolkit.options import AROUND, INDIFFERENT, differing, flat, without
from toolkit.results.run_schedule import rebuild_schedule
from toolkit.results.runs import Run, read_runs

if TYPE_CHECKING:
    import pandas as pd

# Options that always have a column.
PRINCIPAL = (
    "model",
    "data",
    "stages",
    "microbatches",
    "batch",
    "epochs",
    "optimizer.lr",
    "precision",
    "runtime",
)
# A schedule's own sizes, and the options that they replace.
_SIZES = {"n": "microbatches", "n_microbatches": "microbatches", "n_stages": "stages"}
# Options that are shown by a column of their own, or by another option.
_ELSEWHERE = {"seed", "schedule", "device", "workers", "model.name"}
_ELSEWHERE |= {f"schedule.{size}" for size in _SIZES}
_ORIGIN = ("commit", "device", "started", "command")
# Rules are paired by seeds. The runtime changes no result, but a report compares its speed.
_FREE = (INDIFFERENT | {"seed", "schedule"}) - {"runtime"}


def collect(*folders: str | Path) -> "pd.DataFrame":
    """Return every run below ``folders``, a row each, with its options, metrics and origin.

    Accuracies are in per cent; ``seconds`` is a training's wall time. An option has a column if it
    is a principal one or differs between runs. Unfinished runs have NaN as metrics and their
    reason in ``state`` and ``message``.

    Args:
        folders: output folders of runs, or folders above them.

    Raises:
        UserError: a folder does not exist, or there are no runs.
    """
    return frame(read_runs(folders))


def frame(runs: Sequence[Run]) -> "pd.DataFrame":
    """Return the table of :func:`collect`."""
    import pandas as pd

    options_of_runs = [flat_options(run.config) for run in runs]
    # A dict keeps the order and drops repeated names.
    columns = dict.fromkeys([*PRINCIPAL, *differing(options_of_runs)])
    # Every metric of any run is a column, so that runs of several experiments share a table.
    metrics = {"top1": None}
    for run in runs:
        metrics |= dict.fromkeys(run.metrics)
    rows = []
    for run, options in zip(runs, options_of_runs, strict=True):
        row = _about(run)
        row |= {name: run.metrics.get(name, nan) for name in metrics}
        row |= {name: options.get(name) for name in columns}
        versions = run.provenance.get("versions") or {}
        row |= {"toolkit": versions.get(CONSOLE), "torch": versions.get("torch")}
        row |= {name: run.provenance.get(name) for name in _ORIGIN}
        rows.append(row)
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def learning_curves(*folders: str | Path) -> "pd.DataFrame":
    """Return the epochs of every run below ``folders``, a row each; accuracies in per cent.

    An option has a column if it differs between runs.

    Args:
        folders: output folders of runs, or folders above them.

    Raises:
        UserError: a folder does not exist, or there are no runs.
    """
    import pandas as pd

    runs = read_runs(folders)
    options_of_runs = [flat_options(run.config) for run in runs]
    columns = differing(options_of_runs)
    rows = []
    for run, options in zip(runs, options_of_runs, strict=True):
        shown_options = {name: options.get(name) for name in columns}
        for number, epoch in enumerate(run.epochs):
            rows.append(_about(run) | epoch | {"epoch": number} | shown_options)
    if not rows:
        return pd.DataFrame(columns=[*_about(runs[0]), "epoch", "top1"])
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def _about(run: Run) -> dict[str, Any]:
    """Return the columns that identify a run."""
    names = ("kind", "state", "message", "rule", "schedule", "seed")
    return {"folder": str(run.folder)} | {name: getattr(run, name) for name in names}


def flat_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their dotted names.

    A group with a ``_target_`` has the target's last name as its value, the model its own name.
    Lists are JSON. Sizes that the schedule has replace those of the configuration.
    """
    values: dict[str, Any] = {}
    for name, value in without(flat(config), AROUND).items():
        if name.endswith("._target_"):
            name, value = name.removesuffix("._target_"), str(value).rpartition(".")[2]
        if isinstance(value, list):
            # Text, since values are compared, counted and made keys.
            value = json.dumps(value, default=str)
        values[name] = value
    model = config.get("model")
    if isinstance(model, dict):
        values["model"] = (
            model.get("target") or model.get("name") or values.get("model")
        )
    schedule = config.get("schedule")
    if isinstance(schedule, dict) and not schedule.get("file"):
        # The schedule's own size is what ran; the option may be one that a preset left unused.
        for name, option in _SIZES.items():
            if isinstance(schedule.get(name), int):
                values[option] = schedule[name]
    return {name: value for name, value in values.items() if name not in _ELSEWHERE}


@dataclass(frozen=True)
class RunGroup:
    """Runs of one configuration, of every state."""

    # The schedule's name, and the options in which groups of this task differ.
    label: str
    # Options but the schedule and the seed, or those that a comparison shares.
    settings: str
    runs: list[Run]

    @property
    def by_seed(self) -> dict[int, Run]:
        """The run of each seed with a final result; of several, the one that started last."""
        # Later runs replace earlier ones in the dict, so the last start wins.
        by_start = sorted(self.runs, key=lambda run: str(run.provenance.get("started")))
        run_of_seed = {
            run.seed: run for run in by_start if run.counts and run.seed is not None
        }
        return dict(sorted(run_of_seed.items()))

    @property
    def n_diverged(self) -> int:
        """Number of runs whose loss diverged."""
        return sum(run.diverged and not run.counts for run in self.runs)

    def baseline(self, groups: Sequence["RunGroup"]) -> "RunGroup":
        """Return the first group with these settings if several have them, else the first."""
        # A rule that shares its settings with no other is compared with the first one of the task.
        comparable_groups = [
            group for group in groups if group.settings == self.settings
        ]
        if len(comparable_groups) > 1:
            return comparable_groups[0]
        return groups[0]


Tasks = Mapping[str, list[RunGroup]]
"""Groups by the model and data set that they train."""


def each_group(tasks: Tasks) -> Iterator[tuple[str, RunGroup]]:
    """Yield each group with the name of its task."""
    for task, groups in tasks.items():
        for group in groups:
            yield task, group


def group_runs(runs: Sequence[Run]) -> Tasks:
    """Group the training runs with a known schedule, by model and data set.

    Groups without late weights are first.
    """
    # Three levels:
    #
    #     task          model and data: its rules share tables and figures
    #       settings    options that rules share, which are compared with the first of them
    #         rule      its schedule and all of its options: its runs differ in their seeds
    runs_of_task: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        if run.trains and isinstance(run.config.get("schedule"), dict):
            options = flat_options(run.config)
            task = f"{options.get('model', 'a model')} on {options.get('data', 'data')}"
            # The settings of a comparison are those that all its rules share. Otherwise a rule with
            # an option of its own would have no baseline.
            settings = _text(_relevant(flat(run.shared or run.config)))
            rule = _text((run.config["schedule"], _relevant(flat(run.config))))
            runs_of_rule = runs_of_task.setdefault(task, {})
            runs_of_rule.setdefault((settings, rule), []).append(run)
    return {
        task: _labelled(runs_of_rule) for task, runs_of_rule in runs_of_task.items()
    }


def _labelled(configurations: Mapping[tuple[str, str], list[Run]]) -> list[RunGroup]:
    """Return a group per configuration, labelled by its schedule and the options that differ."""
    # The first group is the baseline, so groups with late weights come after the others.
    by_lateness = sorted(configurations.items(), key=lambda item: _is_late(item[1][0]))
    # Labels name only the options that differ between the groups of a task.
    options_of_groups = [
        _relevant(flat_options(runs[0].config)) for _, runs in by_lateness
    ]
    columns = differing(options_of_groups)
    labels = []
    for (_, runs), options in zip(by_lateness, options_of_groups, strict=True):
        words = [runs[0].schedule or runs[0].rule or "schedule"]
        for name in columns:
            if name in options:
                words.append(f"{name.rpartition('.')[2]} {options[name]}")
        labels.append(", ".join(words))
    groups = []
    for label, ((settings, _), runs) in zip(labels, by_lateness, strict=True):
        suffix = ""
        if labels.count(label) > 1:
            suffix = f" ({runs[0].rule}, {runs[0].folder.name})"
        groups.append(RunGroup(label + suffix, settings, runs))
    return groups


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that distinguish configurations; of the data's folder only its name."""
    relevant_options = without(options, _FREE)
    if isinstance(relevant_options.get("data.root"), str):
        # The same data may be in another folder on another machine.
        relevant_options["data.root"] = Path(relevant_options["data.root"]).name
    return relevant_options


def _text(options: Any) -> str:
    """Return options as text that is equal for equal options."""
    return json.dumps(options, sort_keys=True, default=str)


def _is_late(run: Run) -> bool:
    """Return whether the schedule of a run reads old weights."""
    options = run.config["schedule"]
    try:
        return rebuild_schedule(options).max_staleness > 0
    except ValueError:
        # A schedule of another version cannot be rebuilt. Its option is then all that is left to
        # judge by.
        return bool(options.get("delay", 0) != 0)

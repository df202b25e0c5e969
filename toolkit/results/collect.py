"""Runs as tables, a row per run or per epoch, and as groups that can be compared."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.files import CONSOLE
from toolkit.options import AROUND, INDIFFERENT, differing, flat, without
from toolkit.results.runs import Run, read_runs, rebuild_schedule

if TYPE_CHECKING:
    import pandas as pd

# Options that always have a column.
PRINCIPAL = (
    *("model", "data", "stages", "microbatches", "batch", "epochs"),
    *("optimizer.lr", "precision", "runtime"),
)
# A schedule's own sizes, and the options that they replace.
_SIZES = {"n": "microbatches", "n_microbatches": "microbatches", "n_stages": "stages"}
# Options that are shown by a column of their own, or by another option.
_ELSEWHERE = {"seed", "schedule", "device", "workers", "model.name"} | {
    f"schedule.{size}" for size in _SIZES
}
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

    options = [flat_options(run.config) for run in runs]
    columns = dict.fromkeys([*PRINCIPAL, *differing(options)])
    metrics = dict.fromkeys(["top1", *(name for run in runs for name in run.metrics)])
    rows = []
    for run, options_of_run in zip(runs, options, strict=True):
        origin = run.provenance
        versions = origin.get("versions") or {}
        rows.append(
            _about(run)
            | {name: run.metrics.get(name, float("nan")) for name in metrics}
            | {name: options_of_run.get(name) for name in columns}
            | {"toolkit": versions.get(CONSOLE), "torch": versions.get("torch")}
            | {name: origin.get(name) for name in ("commit", "device", "started", "command")}
        )
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
    options = [flat_options(run.config) for run in runs]
    columns = differing(options)
    rows = [
        _about(run)
        | epoch
        | {"epoch": number}
        | {name: options_of_run.get(name) for name in columns}
        for run, options_of_run in zip(runs, options, strict=True)
        for number, epoch in enumerate(run.epochs)
    ]
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
    flat_values: dict[str, Any] = {}
    for name, value in without(flat(config), AROUND).items():
        if name.endswith("._target_"):
            name, value = name.removesuffix("._target_"), str(value).rpartition(".")[2]
        flat_values[name] = json.dumps(value, default=str) if isinstance(value, list) else value
    model, schedule = config.get("model"), config.get("schedule")
    if isinstance(model, dict):
        flat_values["model"] = model.get("target") or model.get("name") or flat_values.get("model")
    if isinstance(schedule, dict) and not schedule.get("file"):
        flat_values |= {
            _SIZES[key]: size
            for key, size in schedule.items()
            if key in _SIZES and isinstance(size, int)
        }
    return {name: value for name, value in flat_values.items() if name not in _ELSEWHERE}


@dataclass(frozen=True)
class Group:
    """Runs of one configuration, of every state."""

    label: str  # the schedule's name, and the options in which groups of this task differ
    settings: str  # options but the schedule and the seed, or those that a comparison shares
    runs: list[Run]

    @property
    def by_seed(self) -> dict[int, Run]:
        """The run of each seed with a final result; of several, the one that started last."""
        by_start = sorted(self.runs, key=lambda run: str(run.provenance.get("started")))
        run_of_seed = {run.seed: run for run in by_start if run.counts and run.seed is not None}
        return dict(sorted(run_of_seed.items()))

    @property
    def n_diverged(self) -> int:
        """Number of runs whose loss diverged."""
        return sum(run.diverged and not run.counts for run in self.runs)

    def baseline(self, others: Sequence["Group"]) -> "Group":
        """Return the first group with these settings if several have them, else the first."""
        comparable_groups = [group for group in others if group.settings == self.settings]
        return (comparable_groups if len(comparable_groups) > 1 else others)[0]


def group_runs(runs: Sequence[Run]) -> dict[str, list[Group]]:
    """Group the training runs with a known schedule, by model and data set.

    Groups without late weights are first.
    """
    tasks: dict[str, dict[tuple[str, str], list[Run]]] = {}
    for run in runs:
        if run.trains and isinstance(run.config.get("schedule"), dict):
            options = flat_options(run.config)
            task = f"{options.get('model', 'a model')} on {options.get('data', 'data')}"
            rule_options = run.config["schedule"], _relevant(flat(run.config))
            key = _text(_relevant(flat(run.shared or run.config))), _text(rule_options)
            tasks.setdefault(task, {}).setdefault(key, []).append(run)
    return {task: _labelled(configurations) for task, configurations in tasks.items()}


def _labelled(configurations: Mapping[tuple[str, str], list[Run]]) -> list[Group]:
    """Return a group per configuration, labelled by its schedule and the options that differ."""
    sorted_configurations = sorted(configurations.items(), key=lambda item: _is_late(item[1][0]))
    options = [_relevant(flat_options(runs[0].config)) for _, runs in sorted_configurations]
    columns = differing(options)
    labels = []
    for (_, runs), relevant_options in zip(sorted_configurations, options, strict=True):
        differences = [
            f"{name.rpartition('.')[2]} {relevant_options[name]}"
            for name in columns
            if name in relevant_options
        ]
        labels.append(", ".join([runs[0].schedule or runs[0].rule or "schedule", *differences]))
    groups = []
    for label, ((settings, _), runs) in zip(labels, sorted_configurations, strict=True):
        suffix = f" ({runs[0].rule}, {runs[0].folder.name})" if labels.count(label) > 1 else ""
        groups.append(Group(label + suffix, settings, runs))
    return groups


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that distinguish configurations; of the data's folder only its name."""
    relevant_options = without(options, _FREE)
    data_root = relevant_options.get("data.root")
    return (
        relevant_options | {"data.root": Path(data_root).name}
        if isinstance(data_root, str)
        else relevant_options
    )


def _text(options: Any) -> str:
    """Return options as text that is equal for equal options."""
    return json.dumps(options, sort_keys=True, default=str)


def _is_late(run: Run) -> bool:
    """Return whether the schedule of a run reads old weights."""
    options = run.config["schedule"]
    try:
        return rebuild_schedule(options).max_staleness > 0
    except ValueError:
        return bool(options.get("delay", 0) != 0)

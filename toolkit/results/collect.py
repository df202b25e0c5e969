"""Runs as tables: a row per run, or a row per epoch."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.options import AROUND, differing, flat, without
from toolkit.results.run_record import Run
from toolkit.results.runs import read_runs

if TYPE_CHECKING:
    import pandas as pd

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
"""Options that always have a column."""

_SIZES = {"n": "microbatches", "n_microbatches": "microbatches", "n_stages": "stages"}
"""A schedule's own sizes, and the options that they replace."""

_ELSEWHERE = {  # shown by a column of its own, or by another option
    *("seed", "schedule", "device", "workers", "model.name"),
    *("schedule.n", "schedule.n_stages", "schedule.n_microbatches"),
}


def collect(*folders: str | Path) -> "pd.DataFrame":
    """Return every run below ``folders``, a row each, with its options, metrics and origin.

    Accuracies are in per cent; ``seconds`` is a training's wall time. An option has a column if it
    is :data:`PRINCIPAL` or differs between runs. Unfinished runs have NaN as metrics and their
    reason in ``state`` and ``message``. A comparison without runs.csv has a row per rule: the
    mean over its seeds.

    Args:
        folders: output folders of runs, or folders above them.

    Raises:
        UserError: a folder does not exist, or there are no runs.
    """
    return frame(read_runs(folders))


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
    differ = differing(options)
    rows = [
        _what(run)
        | {name: int(value) if name == "epoch" else value for name, value in epoch.items()}
        | {name: values.get(name) for name in differ}
        for run, values in zip(runs, options, strict=True)
        for epoch in run.epochs
    ]
    if not rows:
        return pd.DataFrame(columns=[*_what(runs[0]), "epoch", "top1"])
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def frame(runs: Sequence[Run]) -> "pd.DataFrame":
    """Return the table of :func:`collect`."""
    import pandas as pd

    options = [flat_options(run.config) for run in runs]
    shown = dict.fromkeys([*PRINCIPAL, *differing(options)])
    metrics = dict.fromkeys(["top1", *(name for run in runs for name in run.metrics)])
    rows = [
        _what(run)
        | {name: run.metrics.get(name, float("nan")) for name in metrics}
        | {name: values.get(name) for name in shown}
        | _origin(run)
        for run, values in zip(runs, options, strict=True)
    ]
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def flat_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their dotted names.

    A group with a ``_target_`` has the target's last name as its value, the model its own name.
    Lists are JSON. Sizes that the schedule has replace those of the configuration.
    """
    found: dict[str, Any] = {}
    for name, value in without(flat(config), AROUND).items():
        if name.endswith("._target_"):
            name, value = name.removesuffix("._target_"), str(value).rpartition(".")[2]
        found[name] = json.dumps(value, default=str) if isinstance(value, list) else value
    model, schedule = config.get("model"), config.get("schedule")
    if isinstance(model, dict):
        found["model"] = model.get("target") or model.get("name") or found.get("model")
    if isinstance(schedule, dict) and not schedule.get("file"):
        found |= {_SIZES[k]: n for k, n in schedule.items() if k in _SIZES and isinstance(n, int)}
    return {name: value for name, value in found.items() if name not in _ELSEWHERE}


def _what(run: Run) -> dict[str, Any]:
    names = ("kind", "state", "message", "rule", "schedule", "seed")
    return {"folder": str(run.folder)} | {name: getattr(run, name) for name in names}


def _origin(run: Run) -> dict[str, Any]:
    versions = run.provenance.get("versions") or {}
    found = {"toolkit": versions.get("cdp-toolkit"), "torch": versions.get("torch")}
    names = ("commit", "device", "started", "command")
    return found | {name: run.provenance.get(name) for name in names}

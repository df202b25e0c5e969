"""Runs as tidy tables: a row a run, or a row an epoch."""

import json
from collections.abc import Mapping, Sequence
from math import nan
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
"""Options that are columns whether or not the runs differ in them."""

_SIZES = {"n": "microbatches", "n_microbatches": "microbatches", "n_stages": "stages"}
"""A schedule's own sizes, by the options that they are unless they are given."""

_TOLD = {  # by a column of its own, or by another option
    *("seed", "schedule", "device", "workers", "model.name"),
    *("schedule.n", "schedule.n_stages", "schedule.n_microbatches"),
}


def collect(*folders: str | Path) -> "pd.DataFrame":
    """Every run below the folders, a row each: what it was, what came of it, where it is from.

    Accuracies are in per cent, ``seconds`` is a training's wall time. An option has a column if it
    is :data:`PRINCIPAL`, or if runs differ in it. What has not finished is a row, too: ``state``
    and ``message`` tell why, and its metrics are NaN. A row of a comparison whose runs.csv has not
    been kept is the mean over its seeds, and has none.

    Raises:
        ValueError: a folder that does not exist, or without any run.
    """
    return frame(read_runs(folders))


def learning_curves(*folders: str | Path) -> "pd.DataFrame":
    """The epochs of every run below the folders, a row each; accuracies in per cent.

    An option has a column if runs differ in it.

    Raises:
        ValueError: a folder that does not exist, or without any run.
    """
    return epochs_frame(read_runs(folders))


def frame(runs: Sequence[Run]) -> "pd.DataFrame":
    """The table of :func:`collect`."""
    import pandas as pd

    options = [flat_options(run.config) for run in runs]
    shown = [*PRINCIPAL, *(name for name in differing(options) if name not in PRINCIPAL)]
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    rows = [
        _what(run)
        | {name: run.metrics.get(name, float("nan")) for name in ["top1", *metrics]}
        | {name: values.get(name) for name in shown}
        | _origin(run)
        for run, values in zip(runs, options, strict=True)
    ]
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def epochs_frame(runs: Sequence[Run]) -> "pd.DataFrame":
    """The table of :func:`learning_curves`."""
    import pandas as pd

    options = [flat_options(run.config) for run in runs]
    differ = differing(options)
    rows = [
        _what(run) | _counted(epoch) | {name: values.get(name) for name in differ}
        for run, values in zip(runs, options, strict=True)
        for epoch in run.epochs
    ]
    if not rows:
        return pd.DataFrame(columns=[*_what(runs[0]), "epoch", "top1"])
    return pd.DataFrame(rows).astype({"seed": "Int64"})


def flat_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options by their dotted names; a group that a ``_target_`` chooses has its name as a value.

    Lists are JSON. The model is called by its name; sizes are those of the schedule.
    """
    found: dict[str, Any] = {}
    for name, value in without(flat(config), AROUND).items():
        if name.endswith("._target_"):
            name, value = name.removesuffix("._target_"), str(value).rpartition(".")[2]
        found[name] = json.dumps(value, default=str) if isinstance(value, list) else value
    model = config.get("model")
    if isinstance(model, dict):
        found["model"] = model.get("target") or model.get("name") or found.get("model")
    schedule = config.get("schedule")
    if isinstance(schedule, dict) and not schedule.get("file"):
        sizes = {_SIZES[k]: n for k, n in schedule.items() if k in _SIZES and isinstance(n, int)}
        found |= sizes
    return {name: value for name, value in found.items() if name not in _TOLD}


def _what(run: Run) -> dict[str, Any]:
    return {
        "folder": str(run.folder),
        "kind": run.kind,
        "state": run.state,
        "message": run.message,
        "rule": run.rule,
        "schedule": run.schedule,
        "seed": run.seed,
    }


def _counted(epoch: Mapping[str, float]) -> dict[str, float]:
    """Its number whole, if it is."""
    number = epoch.get("epoch", nan)
    return {**epoch, "epoch": int(number) if number.is_integer() else number}


def _origin(run: Run) -> dict[str, Any]:
    found = run.provenance
    versions = found.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    return {
        "commit": found.get("commit"),
        "toolkit": versions.get("cdp-toolkit"),
        "torch": versions.get("torch"),
        "device": found.get("device"),
        "started": found.get("started"),
        "command": found.get("command"),
    }

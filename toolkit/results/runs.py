"""Runs on disk: finished, unfinished or damaged."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files import resumable_in
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.options import ENDED, RESUMED_OTHERWISE
from toolkit.results.comparison_runs import comparison_runs
from toolkit.results.csv_log import read_csv
from toolkit.results.record import (
    METRICS,
    RESULT,
    DamagedError,
    numbers_of,
    per_cent,
    read_json,
    read_result,
    read_yaml,
)
from toolkit.results.run_record import Run, seed_of
from toolkit.results.schedule_from_config import schedule_name

_SCRIPT = re.compile(r"(?:^|[\s/])(\w+)\.py\b")
_INTERPOLATION = re.compile(r"\$\{(\w+)\}")
_LANGUAGE_DATA = ("toolkit.training.data.text", "toolkit.training.data.token_files")
_MESSAGES = {
    "finished": "",
    "running": "it is running, or was killed",
    "stopped": "it was stopped: resume=FOLDER continues it",
    "failed": "it failed without a message",
}


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read every run below ``folders``, in the order of their names, damaged runs too.

    Args:
        folders: output folders of runs, or folders above them; links may name a run twice.

    Raises:
        UserError: a folder does not exist, or there are no runs.
    """
    paths = [Path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            raise UserError(
                f"{path} is not a folder: give the output folder of a run, or one above"
            )
    found: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            found.setdefault(folder.resolve(), folder)
    runs = [run for folder in found.values() for run in _runs_of(folder)]
    if not runs:
        where = ", ".join(map(str, paths)) or "no folder"
        raise UserError(
            f"no runs in {where}: looked for result.json, status.json and .hydra/config.yaml, also"
            " in the folders below; python experiments/train.py hydra.run.dir=FOLDER makes one"
        )
    return runs


def _run_folders(top: Path) -> Iterator[Path]:
    """Folders of runs, from ``top`` down; folders in a comparison's folder are part of it."""
    for place, names, files in os.walk(top):
        folder = Path(place)
        names[:] = sorted(
            (n for n in names if not n.startswith(".") and n not in ("checkpoints", "wandb")),
            key=_number_order,
        )
        job = (folder / ".hydra" / "config.yaml").exists()
        if job or RESULT in files or "status.json" in files:
            yield folder
            if ENDED in files:
                names.clear()


def _number_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts job 10 after job 9."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _runs_of(folder: Path) -> list[Run]:
    """The run of a folder, or the runs of a comparison; none of a report."""
    kind, choice = _job_of(folder)
    run = Run(folder, kind or "unknown", "damaged", rule=choice, config=_options_of(folder))
    try:
        run = _with_options(run, run.config)
        result: dict[str, Any] = {}
        if (folder / RESULT).exists():
            result = read_result(folder)
            source = result["provenance"]
            script = _SCRIPT.search(str(source.get("command")))
            kind = kind or (script[1] if script else "unknown")
            run = replace(run, kind=kind, provenance=source)
            run = _with_options(run, source.get("config") or run.config)
        state, message = _state_of(folder, bool(result))
        run = replace(
            run,
            state=state,
            message=message,
            judged_by=_judge_of(result, run.config),
            notes=result.get("notes", ()),
        )
        if run.kind == "compare":
            return comparison_runs(run, result)
        if run.kind == "train":
            run = _training(run, result)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        why = str(error) if isinstance(error, DamagedError) else f"it is not as expected: {error!r}"
        run = replace(run, state="damaged", message=why)
    return [] if run.kind == "report" else [run]


def _with_options(run: Run, config: Mapping[str, Any]) -> Run:
    name = schedule_name(config.get("schedule"))
    return replace(run, config=config, seed=seed_of(config), schedule=name)


def _state_of(folder: Path, has_result: bool) -> tuple[str, str]:
    """State and message of the run in ``folder``, as of its status file if there is one."""
    if not (folder / "status.json").exists():
        return ("finished", "") if has_result else ("unfinished", "there is no result.json")
    status = read_json(folder / "status.json")
    state = status.get("state")
    if state not in _MESSAGES:
        raise DamagedError(f"status.json: unknown state {state!r}")
    if state == "finished" and not has_result:
        raise DamagedError("status.json says finished, and there is no result.json")
    if state == "stopped" and not resumable_in(folder):
        return state, "it was stopped before its first checkpoint: start it again"
    return state, str(status.get("message") or _MESSAGES[state])


def _judge_of(result: Mapping[str, Any], config: Mapping[str, Any]) -> Metric:
    """The result's metric; without a result, the usual metric of the data."""
    if "judged_by" in result:
        return METRICS[result["judged_by"]]
    data = config.get("data")
    language = isinstance(data, dict) and data.get("_target_") in _LANGUAGE_DATA
    return LOSS if language else ACCURACY


def _training(run: Run, result: Mapping[str, Any]) -> Run:
    """``run`` with what a training has written."""
    options = run.config.get("schedule")
    from_file = isinstance(options, dict) and bool(options.get("file"))
    name = result.get("schedule")
    run = replace(
        run,
        schedule=name or run.schedule,
        rule=(None if from_file else run.rule) or name,
        delays=[numbers_of(row) for row in result.get("delays", ())],
        epochs=[per_cent(row) for row in read_csv(run.folder / "epochs.csv")],
        ranks=[numbers_of(row) for row in read_csv(run.folder / "ranks.csv")],
    )
    if run.state != "finished":
        return run
    metrics = result["metrics"]
    if not isinstance(metrics, dict) or "top1" not in (numbers := per_cent(metrics)):
        raise DamagedError(f"{RESULT}: the metrics of a training have no top1")
    # Options of a run that was resumed with others are only those of its last part.
    changed = next((note for note in run.notes if note.startswith(RESUMED_OTHERWISE)), "")
    seconds = numbers_of(run.provenance).get("seconds", nan)
    return replace(run, message=run.message or changed, metrics=numbers | {"seconds": seconds})


def _options_of(folder: Path) -> dict[str, Any]:
    """Options as Hydra wrote them, with ``${option}`` replaced by its value.

    Other interpolations stay as they are: they could read the environment of this machine.
    """
    config = read_yaml(folder / ".hydra" / "config.yaml")
    if config.get("workers") is not None and "microbatches" in config:
        config["microbatches"] = config["workers"]

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: resolve(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [resolve(inner) for inner in value]
        found = _INTERPOLATION.fullmatch(value) if isinstance(value, str) else None
        return config.get(found[1], value) if found else value

    return {name: resolve(value) for name, value in config.items()}


def _job_of(folder: Path) -> tuple[str, str | None]:
    """The experiment and its choice of a schedule, as Hydra wrote them; otherwise "" and None."""
    hydra: Any = read_yaml(folder / ".hydra" / "hydra.yaml").get("hydra")
    try:
        return str(hydra["job"]["name"]), hydra["runtime"]["choices"].get("schedule")
    except (AttributeError, KeyError, TypeError):
        return "", None

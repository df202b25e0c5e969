"""Runs on disk, found and read: whole, unfinished or damaged."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

from toolkit.cli.sweeps import resumable_in
from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.options import RESUMED_OTHERWISE
from toolkit.results.comparison_runs import runs_of_rules
from toolkit.results.hydra_config import job_in, kind_of, options_in
from toolkit.results.reader import (
    DamagedError,
    number_rows,
    numbers_of,
    per_cent,
    read_csv,
    read_json,
    text_or_none,
    whole_number,
)
from toolkit.results.run_record import STATES, Run
from toolkit.results.schedule_from_config import schedule_name

_OWN = "report"  # the experiment that reads runs, and is none
_TEXTS = ("toolkit.training.data.text", "toolkit.training.data.token_files")
_NOT_ENDED = {
    "finished": "",
    "running": "it is running, or was killed",
    "stopped": "it was stopped: resume=FOLDER goes on",
    "failed": "it failed and does not say why",
}


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Every run below the folders, in the order of their names; what is damaged is one, too.

    Raises:
        ValueError: a folder that does not exist, or no runs in any.
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
    """Folders of runs, from ``top`` down; below a comparison there are none of their own."""
    for place, names, files in os.walk(top):
        folder = Path(place)
        names[:] = sorted(
            (n for n in names if not n.startswith(".") and n not in ("checkpoints", "wandb")),
            key=_by_number,
        )
        job = (folder / ".hydra" / "config.yaml").exists()
        if job or "result.json" in files or "status.json" in files:
            yield folder
            if "runs.csv" in files:
                names.clear()


def _by_number(name: str) -> list[tuple[int, str]]:
    """Orders job 10 after job 9."""
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]


def _runs_of(folder: Path) -> list[Run]:
    """The runs of one folder: one, or those of a comparison; none of a report's."""
    state, message = "unfinished", "there is no result.json"
    result: dict[str, Any] = {}
    try:
        if (folder / "result.json").exists():
            result = read_json(folder / "result.json")
            state, message = "finished", ""
        state, message = _status(folder, state, message)
    except DamagedError as error:
        state, message = "damaged", str(error)
    source = result.get("provenance")
    lacking = state == "finished" and not isinstance(source, dict)
    if lacking:
        message = "result.json has no provenance: it is of another version"
    told = source if isinstance(source, dict) else {}
    config = told["config"] if isinstance(told.get("config"), dict) else options_in(folder)
    kind, choice = job_in(folder)
    kind = kind or kind_of(told.get("command"), config) or "unknown"
    if kind == _OWN:
        return []
    by = _judged_by(result, config)
    base = Run(
        *(folder, kind, state, message, lacking),
        rule=choice,
        config=config,
        judged_by=by,
        notes=_notes(result.get("notes")),
        provenance=told,
    )
    try:
        if kind == "compare" and state != "damaged":
            return runs_of_rules(base, result)
        return [_trained(base, result)]
    except DamagedError as error:
        return [replace(base, state="damaged", message=str(error))]


def _notes(told: Any) -> list[str]:
    return [note for note in told if isinstance(note, str)] if isinstance(told, list) else []


def _judged_by(result: Mapping[str, Any], config: Mapping[str, Any]) -> Metric:
    """As its result tells; of a run without one, as is usual for its data."""
    data = config.get("data")
    text = isinstance(data, dict) and data.get("_target_") in _TEXTS
    by_name = {measure.name: measure for measure in (ACCURACY, LOSS)}
    return by_name.get(str(result.get("judged_by")), LOSS if text else ACCURACY)


def _status(folder: Path, state: str, message: str) -> tuple[str, str]:
    """What status.json says, or else what was seen."""
    if not (folder / "status.json").exists():
        return state, message
    status = read_json(folder / "status.json")
    said = status.get("state")
    if said not in STATES[:4]:
        raise DamagedError(f"status.json: unknown state {said!r}")
    if said == "finished" and state != "finished":
        return "damaged", "status.json says finished, and there is no result.json"
    if said == "stopped" and not resumable_in(folder):
        return said, "it was stopped before anything of it was saved: start it again"
    return said, str(status.get("message") or _NOT_ENDED[said])


def _trained(run: Run, result: Mapping[str, Any]) -> Run:
    """A single training, or another experiment's result."""
    config = run.config
    schedule = config.get("schedule")
    run = replace(run, seed=whole_number(config.get("seed")))
    if run.kind != "train":
        return replace(run, rule=None)
    from_file = isinstance(schedule, dict) and bool(schedule.get("file"))
    run = replace(
        run,
        schedule=text_or_none(result.get("schedule")) or schedule_name(schedule),
        rule=(None if from_file else run.rule) or text_or_none(result.get("schedule")),
        delays=number_rows(result.get("delays")),
    )
    if run.state == "damaged":
        return run
    epochs = read_csv(run.folder / "epochs.csv")
    ranks = read_csv(run.folder / "ranks.csv")
    run = replace(run, epochs=[per_cent(row) for row in epochs], ranks=ranks)
    if run.state != "finished":
        return run
    metrics = result.get("metrics")
    numbers = numbers_of(metrics) if isinstance(metrics, dict) else {}
    if "top1" not in numbers:
        told = "the metrics in result.json have no top1: they are of another version"
        return replace(run, message=run.message or told)
    changed = next((note for note in run.notes if note.startswith(RESUMED_OTHERWISE)), "")
    run = replace(run, message=run.message or changed)  # its options are but the last ones
    seconds = numbers_of(run.provenance).get("seconds", nan)
    return replace(run, metrics=per_cent(numbers) | {"seconds": seconds})

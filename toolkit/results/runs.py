"""Runs on disk: finished, unfinished or damaged. A comparison is a run per rule and seed."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.options import RESUMED_OTHERWISE, with_own
from toolkit.results import record
from toolkit.results.record import (
    RESULT,
    DamagedError,
    Numbers,
    PlainRow,
    numbers_of,
    per_cent,
)
from toolkit.results.run_files import EPOCHS_FILE, OPTIONS_FILE, STATUS, resumable_in
from toolkit.results.run_schedule import schedule_name

MESSAGES = {
    "finished": "",
    "running": "it is running, or was killed",
    "stopped": "it was stopped: resume=FOLDER continues it",
    "failed": "it failed without a message",
    "unfinished": "there is no result.json",
    "damaged": "",
}
"""The states of runs, and the usual message of each."""

_SCRIPT = re.compile(r"(?:^|[\s/])(?:(\w+)\.py\b|(?:cyclic-dp|-m toolkit) (\w+))")
_INTERPOLATION = re.compile(r'"\$\{(\w+)\}"')
_LANGUAGE_DATA = ("toolkit.training.data.text", "toolkit.training.data.token_files")
_MOST_SEEDS = 10_000  # of a comparison


@dataclass(frozen=True)
class Run:
    """One training, or another result, as read from its folder."""

    folder: Path  # several runs of a comparison share it
    kind: str  # the experiment, such as train or compare
    state: str  # a key of MESSAGES
    message: str = ""  # reason why it is unfinished, or a caution
    failed_by_divergence: bool = False  # as its status file says
    rule: str | None = None  # name of its schedule in the configuration
    schedule: str | None = None  # the schedule's own name
    seed: int | None = None  # of weights and data
    # Of a comparison, those of this run.
    config: Mapping[str, Any] = field(default_factory=dict)
    # Those that its comparison shares.
    shared: Mapping[str, Any] = field(default_factory=dict)
    judged_by: Metric = ACCURACY
    # Of the last epoch; accuracies in per cent.
    metrics: Numbers = field(default_factory=dict)
    epochs: Sequence[Numbers] = ()  # the metrics of every epoch
    delays: Sequence[Numbers] = ()  # delay diagnostics, a row per stage
    ranks: Sequence[Mapping[str, Any]] = ()  # measurements, a row per rank
    notes: Sequence[str] = ()  # what went wrong; of a comparison, in all of its runs
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def trains(self) -> bool:
        """Whether the experiment trains a model."""
        return self.kind in ("train", "compare")

    @property
    def diverged(self) -> bool:
        """Whether its loss diverged, which ended it."""
        return self.failed_by_divergence or _diverged_in(self.epochs) is not None

    @property
    def counts(self) -> bool:
        """Whether it has a final accuracy and a known schedule."""
        has_schedule = isinstance(self.config.get("schedule"), dict)
        has_accuracy = isfinite(self.metrics.get("top1", nan))
        return (
            self.trains and self.state == "finished" and has_schedule and has_accuracy
        )


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Read every run below ``folders``, in the order of their names, damaged runs too.

    Args:
        folders: output folders of runs, or folders above them; links may name a run twice.

    Raises:
        UserError: a folder does not exist, or there are no runs.
    """
    folder_of_path: dict[Path, Path] = {}
    for top_folder in map(Path, folders):
        if not top_folder.is_dir():
            raise UserError(
                f"{top_folder} is not a folder: give the output folder of a run, or one above"
            )
        for parent, names, files in os.walk(top_folder):
            folder = Path(parent)
            # Assigning to the slice says where os.walk descends, and in which order.
            names[:] = sorted(filter(_may_hold_runs, names), key=_job_order)
            has_job = (folder / ".hydra" / "config.yaml").exists()
            if has_job or RESULT in files or STATUS in files:
                # The first name of a folder counts: links may lead to it by others.
                folder_of_path.setdefault(folder.resolve(), folder)
                # Folders in a comparison's folder are part of it.
                if EPOCHS_FILE in files:
                    names.clear()
    runs: list[Run] = []
    for folder in folder_of_path.values():
        runs += _runs_of(folder)
    if not runs:
        raise UserError(
            f"no runs in {', '.join(map(str, folders)) or 'no folder'}: looked for result.json,"
            " status.json and .hydra/config.yaml, also in the folders below"
        )
    return runs


def _may_hold_runs(folder_name: str) -> bool:
    return folder_name[0] != "." and folder_name not in ("checkpoints", "wandb")


def _job_order(folder_name: str) -> str:
    """Return the sort key of a folder: job 10 is after job 9."""
    if folder_name.isdigit():
        return folder_name.zfill(9)
    return folder_name


def _runs_of(folder: Path) -> list[Run]:
    """Return the run of a folder, or the runs of a comparison; empty for a report."""
    run = Run(folder, "unknown", "damaged")
    try:
        # 1. What Hydra wrote before the run began: experiment, rule and options.
        job = record.read_yaml(folder / ".hydra" / "hydra.yaml")
        if job:
            rule = job["hydra"]["runtime"]["choices"].get("schedule")
            run = replace(run, kind=job["hydra"]["job"]["name"], rule=rule)
        run = _described(run, _options_of(folder))
        # 2. The result, whose options count: they are those that have been resolved.
        result: PlainRow = {}
        if (folder / RESULT).exists():
            result = record.read_result(folder)
            origin = result["provenance"]
            script = _SCRIPT.search(str(origin.get("command")))
            if run.kind == "unknown" and script:
                run = replace(run, kind=script[1] or script[2])
            run = _described(run, origin.get("config") or run.config)
            metric = record.METRICS.get(result["judged_by"], run.judged_by)
            run = replace(
                run, judged_by=metric, provenance=origin, notes=result["notes"]
            )
        # 3. How it ended, and the tables that it has.
        run = _with_state(run, has_result=bool(result))
        if run.kind == "compare":
            return _comparison_runs(run, result)
        if run.kind == "train":
            run = _training(run, result)
    # Anybody may have written these files, so their values may have any type.
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        reason = str(error)
        if not isinstance(error, DamagedError):
            reason = f"it is not as expected: {error!r}"
        run = replace(run, state="damaged", message=reason)
    if run.kind == "report":
        return []
    return [run]


def _described(run: Run, config: Mapping[str, Any]) -> Run:
    """Return ``run`` with the fields that follow from its options, such as its metric."""
    seed, data = config.get("seed"), config.get("data")
    # A column of a table has 64 bits.
    if not (isinstance(seed, int) and abs(seed) < 2**63):
        seed = None
    metric = ACCURACY
    if isinstance(data, dict) and data.get("_target_") in _LANGUAGE_DATA:
        metric = LOSS
    return replace(
        run,
        config=config,
        seed=seed,
        schedule=schedule_name(config.get("schedule")),
        judged_by=metric,
    )


def _with_state(run: Run, has_result: bool) -> Run:
    """Return ``run`` with its state and message, from its status file if it has one."""
    if (run.folder / STATUS).exists():
        status = record.read_json(run.folder / STATUS)
    elif has_result:
        status = {"state": "finished"}
    else:
        status = {"state": "unfinished"}
    state = status.get("state")
    if state not in MESSAGES or (state == "finished" and not has_result):
        raise DamagedError(f"{STATUS} says {state}; the run has {RESULT}: {has_result}")
    message = str(status.get("message") or MESSAGES[state])
    if state == "stopped" and not resumable_in(run.folder):
        message = "it was stopped before its first checkpoint: start it again"
    diverged = status.get("diverged") is True
    return replace(run, state=state, message=message, failed_by_divergence=diverged)


def _diverged_in(epochs: Sequence[Numbers]) -> int | None:
    """Return the first epoch whose training loss is NaN, or None."""
    for number, epoch in enumerate(epochs):
        if isnan(epoch.get("train_loss", 0.0)):
            return number
    return None


def _training(run: Run, result: PlainRow) -> Run:
    """Return ``run`` with the files of a training; ``result`` is empty until it ends."""
    options = run.config.get("schedule")
    name = result.get("schedule")
    rule = run.rule
    # The rule's name is that of the group.
    if isinstance(options, dict) and options.get("file"):
        rule = None
    run = replace(
        run,
        schedule=name or run.schedule,
        rule=rule or name,
        delays=[*map(numbers_of, result.get("delays", ()))],
        epochs=[*map(per_cent, record.read_csv(run.folder / "epochs.csv"))],
        ranks=record.read_csv(run.folder / "ranks.csv"),
    )
    if run.state != "finished":
        return run
    metrics = result["metrics"]
    numbers: Numbers = {}
    if isinstance(metrics, dict):
        numbers = per_cent(metrics)
    if "top1" not in numbers:
        raise DamagedError(f"{RESULT}: the metrics of a training have no top1")
    numbers["seconds"] = numbers_of(run.provenance).get("seconds", nan)
    # Options of a run that was resumed with others are only those of its last part.
    cautions = [note for note in run.notes if note.startswith(RESUMED_OTHERWISE)]
    return replace(run, message=run.message or "".join(cautions[:1]), metrics=numbers)


def _comparison_runs(comparison: Run, result: PlainRow) -> list[Run]:
    """Return a comparison's runs; ``comparison`` has what they share.

    ``result`` is empty until the comparison ends.
    """
    config = comparison.config
    folder = comparison.folder
    epochs = _epochs_of_runs(comparison)
    # Rules that a resumed comparison has left out are only in its file.
    saved_options = record.read_yaml(folder / OPTIONS_FILE)
    rules = (saved_options.get("rules") or {}) | (config.get("rules") or {})
    # The saved ones have the tuned learning rates, so they come second.
    own_options = (config.get("own") or {}) | (saved_options.get("own") or {})
    schedule_names = {
        row["rule"]: row["schedule"]
        for row in result.get("metrics", ())
        if "schedule" in row
    }
    # Of a comparison alone; its runs have no such options.
    shared = {
        name: value
        for name, value in config.items()
        if name not in ("rules", "own", "seeds")
    }
    delays = result.get("delays", ())
    # Runs are trained in this order, so the state of the comparison is that of the first unfinished
    # run. Those after it have not started.
    unfinished_state = comparison.state, comparison.message
    runs = []
    for rule, seed in dict.fromkeys([*_planned(comparison), *epochs]):
        run_config = with_own(shared, own_options.get(rule) or {}) | {"seed": seed}
        if isinstance(rules.get(rule), dict):
            run_config["schedule"] = rules[rule]
        run = replace(
            comparison,
            rule=rule,
            seed=seed,
            schedule=schedule_names.get(rule) or schedule_name(rules.get(rule)) or rule,
            config=run_config,
            shared=shared,
            epochs=epochs.get((rule, seed), []),
            delays=[numbers_of(row) for row in delays if row.get("rule") == rule],
        )
        ended_run = _ended_run(run, comparison)
        if ended_run is None:
            state, message = unfinished_state
            ended_run = replace(run, state=state, message=message)
            unfinished_state = "unfinished", "it has not started"
        runs.append(ended_run)
    return runs or [comparison]


def _epochs_of_runs(comparison: Run) -> dict[tuple[str, int], list[Numbers]]:
    """Return the epochs of a comparison's runs, by rule and seed; accuracies in per cent."""
    path = comparison.folder / EPOCHS_FILE
    if comparison.state == "finished" and not path.exists():
        raise DamagedError(f"there is no {EPOCHS_FILE}")
    epochs: dict[tuple[str, int], list[Numbers]] = {}
    for row in record.read_csv(path, words=("rule",)):
        key = row.pop("rule"), row.pop("seed")
        epochs.setdefault(key, []).append(per_cent(row))
    return epochs


def _ended_run(run: Run, comparison: Run) -> Run | None:
    """Return an ended run of a comparison with its state; None if the run is unfinished."""
    comparison_has_ended = comparison.state == "finished"
    has_all_epochs = len(run.epochs) == comparison.config.get("epochs")
    diverged_epoch = _diverged_in(run.epochs)
    if diverged_epoch is not None:
        message = f"its loss diverged in epoch {diverged_epoch}"
        return replace(run, state="failed", message=message)
    if run.epochs and (comparison_has_ended or has_all_epochs):
        return replace(run, state="finished", message="", metrics=dict(run.epochs[-1]))
    if comparison_has_ended:
        return replace(run, state="unfinished", message=f"{EPOCHS_FILE} lacks it")
    return None


def _planned(comparison: Run) -> list[tuple[str, int]]:
    """Return rule and seed of each run that a comparison asks for."""
    first_seed = comparison.seed or 0
    n_seeds = comparison.config.get("seeds") or 0
    if n_seeds > _MOST_SEEDS:
        raise DamagedError(f"seeds is at most {_MOST_SEEDS}: got {n_seeds}")
    keys: list[tuple[str, int]] = []
    for seed in range(first_seed, first_seed + n_seeds):
        keys += [(rule, seed) for rule in comparison.config.get("rules") or {}]
    return keys


def _options_of(folder: Path) -> PlainRow:
    """Return the options as Hydra wrote them, with ``${option}`` replaced by its value.

    Other interpolations stay as they are: they could read the environment of this machine.
    """
    # Hydra writes options before the experiment resolves its shorthands.
    config = record.read_yaml(folder / ".hydra" / "config.yaml")
    if config.get("workers") is not None and "microbatches" in config:
        config["microbatches"] = config["workers"]
    values = {name: json.dumps(value, default=str) for name, value in config.items()}
    # In JSON an interpolation is a whole quoted text, so its value can take the place of the
    # quotes, too.
    text = json.dumps(config, default=str)
    return dict(
        json.loads(
            _INTERPOLATION.sub(lambda match: values.get(match[1], match[0]), text)
        )
    )

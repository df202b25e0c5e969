"""A comparison: each rule with each seed, one run after another, and the files of its runs.

Runs that have ended are in ``runs.csv``, ``delays.csv`` and ``notes.csv``. One that has begun and
not ended has its own folder for checkpoints, in the folder ``under_way``. The options that runs are
trained with are in ``runs.yaml``, which has every rule so far. This module trains the runs;
:mod:`toolkit.results.statistics` computes what they show.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isnan
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError
from toolkit.files import digest_of, note_write_errors, write_csv, write_text
from toolkit.options import INDIFFERENT, TrackingOptions
from toolkit.results.progress import Progress, RunProgress
from toolkit.results.record import RESULT, PlainRow, read_csv, read_result, read_yaml
from toolkit.results.run_files import (
    DELAYS_FILE,
    EPOCHS_FILE,
    NOTES_FILE,
    OPTIONS_FILE,
    UNDER_WAY_FOLDER,
    has_checkpoint,
)
from toolkit.results.run_recorder import RunRecorder
from toolkit.results.run_schedule import DIGEST
from toolkit.results.wandb_run import group_of
from toolkit.runtime import World
from toolkit.torchrun import is_rank_zero, restarted
from toolkit.training import DivergedError, StoppedError, TrainingRun
from toolkit.training.option_changes import changed_options
from toolkit.training.run_with_checkpoints import rollback_schedule
from toolkit.training.stop_signals import Signals

# Options that may differ when a comparison is resumed. Seeds are only added, and data may have
# moved. Rules and their own options may not: _check_options compares them rule by rule.
_FREE = (INDIFFERENT | {"seed", "data.root"}) - {"rules", "own"}

RunOptions = Mapping[str, Any]
"""Options of a comparison, as plain values: ``rules``, ``own``, ``seed``, ``seeds``, ..."""

Key = tuple[str, int]
"""Rule and seed of a run."""


@dataclass(frozen=True)
class RuleRun:
    """One rule with one seed."""

    rule: str  # its name in the configuration
    seed: int  # of weights and data
    epochs: list[PlainRow]  # metrics, a row per epoch
    delays: list[PlainRow]  # delay diagnostics, a row per step and stage
    notes: list[str] = field(default_factory=list)  # what went wrong
    where: str = ""  # how to find it in W&B

    @property
    def diverged_in(self) -> int | None:
        """The epoch in which its loss diverged, or None."""
        return next(
            (row["epoch"] for row in self.epochs if isnan(row["train_loss"])), None
        )

    def named(self, rows: list[PlainRow]) -> list[PlainRow]:
        """Return ``rows`` of this run with its rule and seed."""
        return [{"rule": self.rule, "seed": self.seed} | row for row in rows]


def seeds_of(options: RunOptions) -> range:
    """Return the seeds with which a comparison trains each rule."""
    return range(options["seed"], options["seed"] + options["seeds"])


def select_runs(options: RunOptions, runs: Sequence[RuleRun]) -> list[RuleRun]:
    """Return the runs whose rule and seed the comparison asks for."""
    seeds = seeds_of(options)
    return [run for run in runs if run.rule in options["rules"] and run.seed in seeds]


def runs_so_far(
    options: RunOptions, folder: Path, world: World | None
) -> tuple[list[RuleRun], list[Key]]:
    """Return the runs in ``folder`` that have ended, and the keys of those that are saved.

    It also writes the options to ``folder``. Every rank of ``world`` calls it, and gets what the
    first rank finds. Without resume there are no runs.

    Args:
        options: those of the comparison.
        folder: folder of the comparison.
        world: the ranks, if there are several.

    Raises:
        UserError: runs in the folder were trained with other options.
    """
    # Rank 0 alone reads and writes the folder; the others get its answer, so that all train the
    # same runs in the same order.
    runs_and_saved = None
    if is_rank_zero():
        runs: list[RuleRun] = []
        if options["resume"] or restarted():
            runs = read_ended_runs(folder, options)
        keep_options(folder, options)
        if runs:  # writes the tables without the rows of runs that were interrupted
            keep_runs(folder, runs)
        runs_and_saved = runs, _saved(folder)
    if world is not None:
        runs_and_saved = world.gather(runs_and_saved)[0]
    assert runs_and_saved is not None
    return runs_and_saved


def train_all(
    options: RunOptions,
    build: Callable[[str, int], TrainingRun],
    folder: Path,
    ended: Sequence[RuleRun],
    saved_keys: Sequence[Key],
    world: World | None = None,
) -> Iterator[RuleRun]:
    """Train the runs that have not ended, those with a checkpoint first.

    ``build`` makes the run of a rule with a seed, in the comparison's ``folder``.

    Raises:
        UserError: one of them cannot be trained with its options; none has begun then.
        StoppedError: a signal has ended the run under way, and with it the comparison.
    """
    keys = unfinished(options, ended, saved_keys)
    # A run that has begun with a wrong option of another rule would be lost time.
    check_runs(options, build, keys)
    n_epochs = options["epochs"] * len(keys)
    with (
        Progress(n_epochs, visible=is_rank_zero()) as progress,
        Signals().heard() as signals,
    ):
        for key in keys:
            # Ranks continue until all know of a signal. One that left on its own would leave the
            # others waiting in a collective.
            number = signals.agreed if world else signals.number
            if number:
                raise StoppedError(number, saved=True)
            run = build(*key)
            if is_rank_zero():
                prepare_folder(folder, *key)
            ended_run = train_one(run, key, folder, progress, signals)
            # Free its memory before the next run is built.
            del run
            yield ended_run


def unfinished(
    options: RunOptions, ended: Sequence[RuleRun], saved_keys: Sequence[Key]
) -> list[Key]:
    """Return the runs that have not ended in their order, those with a checkpoint first."""
    ended_keys = {(run.rule, run.seed) for run in ended}
    keys = []
    for seed in seeds_of(options):
        # All rules of a seed come before the next seed, so that a comparison that is stopped early
        # has pairs.
        keys += [
            (rule, seed) for rule in options["rules"] if (rule, seed) not in ended_keys
        ]
    return sorted(keys, key=lambda key: key not in saved_keys)


def check_runs(
    options: RunOptions,
    build: Callable[[str, int], TrainingRun],
    keys: Sequence[Key],
    check: Callable[[TrainingRun], object] = rollback_schedule,
) -> None:
    """Check all options before the first run has trained for hours.

    Args:
        options: those of the comparison.
        build: function that makes the run of a rule with a seed.
        keys: runs to train.
        check: function that is called with a run of each rule.

    Raises:
        UserError: a run cannot be trained with its options.
    """
    TrackingOptions(**options["tracking"])
    # One run of each rule is enough: seeds change no option that could be wrong.
    for rule in dict.fromkeys(rule for rule, _ in keys):
        check(build(rule, options["seed"]))


def train_one(
    run: TrainingRun, key: Key, folder: Path, progress: RunProgress, signals: Signals
) -> RuleRun:
    """Train one run of the comparison in ``folder``, or continue it from its checkpoint.

    The run's folder exists, see :func:`prepare_folder`.

    Raises:
        StoppedError: a signal has ended the run.
    """
    rule, seed = key
    n_epochs = run.options.epochs
    notes: list[str] = []
    run_folder = folder_of_run(folder, rule, seed)
    with RunRecorder(
        run,
        run_folder,
        # Continue the tables of the run, if it has any.
        resume=True,
        group=group_of(folder),
        comparison=folder,
        rule=rule,
    ) as recorder:
        tracker = recorder.tracker
        tracker.config({"rule": rule})
        try:
            with recorder.training(
                # None: from its own checkpoint, if it has one.
                progress,
                resume=None,
                weights=False,
                signals=signals,
            ) as train:
                outcome = train()
        except DivergedError as divergence:
            epochs = divergence.all_epochs(n_epochs)
            score = "diverged"
            tracker.end(
                f"failed: its loss diverged in epoch {len(divergence.epochs)}", 1
            )
        else:
            epochs = outcome.epochs
            score = epochs[-1].text(run.samples.form.metric)
            tracker.last_epoch(epochs[-1])
            notes += outcome.notes
            if outcome.resumed_at:
                notes.append(f"resumed at step {outcome.resumed_at}")
        # Also the epochs after a divergence: the bar counts those of all runs.
        progress.ended(n_epochs)
        progress.note(f"last: {run.schedule.name} {score}")
    return RuleRun(
        rule,
        seed,
        epochs=[*map(asdict, epochs)],
        delays=recorder.delays.rows(),
        notes=[f"{rule}, seed {seed}: {note}" for note in notes] + tracker.notes,
        where=tracker.where,
    )


def read_ended_runs(folder: Path, options: RunOptions) -> list[RuleRun]:
    """Return the runs in ``folder`` that reached their last epoch, of all rules and seeds.

    Runs that cannot be read, or were trained with other ``options``, raise UserError.
    """
    run_of_key: dict[Key, RuleRun] = {}

    def rows_of(name: str) -> Iterator[tuple[RuleRun, PlainRow]]:
        for row in read_csv(folder / name, words=("rule", "note")):
            key = row.pop("rule"), row.pop("seed")
            yield run_of_key.setdefault(key, RuleRun(*key, epochs=[], delays=[])), row

    for run, row in rows_of(EPOCHS_FILE):
        run.epochs.append(row)
    for run, row in rows_of(DELAYS_FILE):
        run.delays.append(row)
    for run, row in rows_of(NOTES_FILE):
        run.notes.append(row["note"])
    trained_rules = {rule for rule, _ in [*run_of_key, *_saved(folder)]}
    if trained_rules:
        _check_options(folder, options, trained_rules)
    return [run for run in run_of_key.values() if len(run.epochs) == options["epochs"]]


def _check_options(folder: Path, options: RunOptions, trained_rules: set[str]) -> None:
    """Raise UserError if runs of ``trained_rules`` were trained with other options."""
    earlier_options = _earlier_options(folder)
    new_options = _with_digests(options)
    if not isinstance(earlier_options.get("rules"), dict):
        raise UserError(
            f"resume={folder} has runs, but no readable {OPTIONS_FILE} with their options: start in"
            " a new folder, without resume"
        )
    common_rules = trained_rules & new_options["rules"].keys()
    free_options = set(_FREE)
    for rule in {*earlier_options["rules"], *new_options["rules"]} - common_rules:
        free_options |= {f"rules.{rule}", f"own.{rule}"}
    change = changed_options(earlier_options, new_options, free_options)
    if change:
        raise UserError(
            f"resume={folder} has runs that were trained with other options: {change}; leave"
            " them as they were, or start in a new folder, without resume"
        )


def _earlier_options(folder: Path) -> PlainRow:
    """Return the options of the runs in ``folder``, from its result if it has no options file."""
    # Results of older versions have no options file, but their provenance has the options.
    if (folder / OPTIONS_FILE).exists() or not (folder / RESULT).exists():
        return read_yaml(folder / OPTIONS_FILE)
    return read_result(folder)["provenance"]["config"]


def keep_options(folder: Path, options: RunOptions) -> None:
    """Write the options of runs to ``folder``; rules of earlier runs stay in its file."""
    content = _with_digests(options)
    earlier_options = _earlier_options(folder)
    own_options = {**(earlier_options.get("own") or {})}
    for rule in content["rules"]:
        own_options.pop(rule, None)
    content["own"] = own_options | content.get("own", {})
    content["rules"] = (earlier_options.get("rules") or {}) | content["rules"]
    folder.mkdir(exist_ok=True)
    write_text(
        folder / OPTIONS_FILE,
        yaml.safe_dump(content, sort_keys=False, allow_unicode=True),
    )


def keep_runs(folder: Path, runs: Sequence[RuleRun]) -> None:
    """Write the tables of ``runs``, which have ended, and remove the folders of their own."""
    delays: list[PlainRow] = []
    notes: list[PlainRow] = []
    epochs: list[PlainRow] = []
    for run in runs:
        delays += run.named(run.delays)
        notes += run.named([{"note": note} for note in run.notes])
        epochs += run.named(run.epochs)
    # The epochs last, since a run counts as ended when it is in their file.
    for name, rows in (
        (DELAYS_FILE, delays),
        (NOTES_FILE, notes),
        (EPOCHS_FILE, epochs),
    ):
        if rows:
            write_csv(folder / name, rows)
    for run in runs:
        # Only after the tables, or a process that dies in between would lose the run with its
        # checkpoint.
        shutil.rmtree(folder_of_run(folder, run.rule, run.seed), ignore_errors=True)
    with suppress(OSError):  # other runs are under way
        (folder / UNDER_WAY_FOLDER).rmdir()


def try_keep_runs(folder: Path, runs: Sequence[RuleRun]) -> str:
    """Keep runs as :func:`keep_runs`; return why they cannot be written, or an empty text."""
    errors: list[str] = []
    with note_write_errors(errors, folder):
        keep_runs(folder, runs)
    return "".join(errors)


def folder_of_run(folder: Path, rule: str, seed: int) -> Path:
    """Return the folder of a run of a comparison, which exists until the run has ended."""
    return folder / UNDER_WAY_FOLDER / f"{rule}_{seed}"


def prepare_folder(folder: Path, rule: str, seed: int) -> None:
    """Make the folder of a run under way, empty unless it has a checkpoint."""
    run_folder = folder_of_run(folder, rule, seed)
    # Files of a run that was killed before its first checkpoint would be taken for the new run's.
    if not has_checkpoint(run_folder):
        shutil.rmtree(run_folder, ignore_errors=True)
        run_folder.parent.mkdir(exist_ok=True)
        run_folder.mkdir()


def _saved(folder: Path) -> list[Key]:
    """Return the keys of the unfinished runs in ``folder`` that have a checkpoint."""
    saved_folders = filter(has_checkpoint, (folder / UNDER_WAY_FOLDER).glob("*_*"))
    keys = []
    for path in saved_folders:
        # From the right, since names of rules have underscores too.
        rule, _, seed = path.name.rpartition("_")
        if seed.isdecimal():
            keys.append((rule, int(seed)))
    return keys


def _with_digests(options: RunOptions) -> dict[str, Any]:
    """Return ``options`` with the digest of each rule's file, since files may change."""
    rules = {name: dict(rule) for name, rule in options["rules"].items()}
    for rule in rules.values():
        if rule.get("file"):
            rule[DIGEST] = digest_of(Path(rule["file"]))[:16]
    return {**options, "rules": rules}

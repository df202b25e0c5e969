"""The files of a comparison: its runs and their options.

Runs that have ended are in ``runs.csv``, ``delays.csv`` and ``notes.csv``; one that is under way
has a folder of its own for its checkpoints, in ``under_way``. The options that they are trained
with are in ``runs.yaml``, which has every rule with a run.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import UserError
from toolkit.files import has_checkpoint, note_write_errors, write_csv, write_text
from toolkit.options import COMPARED, ENDED, INDIFFERENT, UNDER_WAY
from toolkit.results.csv_log import read_csv
from toolkit.results.record import read_yaml
from toolkit.training.run_with_checkpoints import changed_options

# Runs are paired by their seeds, and data may have moved; rules that have run stay as they are.
_FREE = (INDIFFERENT | {"seed", "data.root"}) - {"rules"}

_ORDERS = "orders"  # in the options: digests of rank orders that rules have from files


Key = tuple[str, int]
"""Rule and seed of a run."""


@dataclass(frozen=True)
class RuleRun:
    """One rule with one seed.

    Attributes:
        rule: its name in the configuration.
        seed: of weights and data.
        epochs: metrics, a row per epoch.
        delays: delay diagnostics, a row per step and stage.
        notes: sentences on what went wrong.
        where: how to find it in W&B.
    """

    rule: str
    seed: int
    epochs: list[dict[str, Any]]
    delays: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    where: str = ""

    @property
    def diverged_in(self) -> int | None:
        """The epoch in which its loss diverged, or None."""
        return next((e["epoch"] for e in self.epochs if isnan(e["train_loss"])), None)

    def named(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``rows`` of this run with its rule and seed."""
        return [{"rule": self.rule, "seed": self.seed} | row for row in rows]


Options = Mapping[str, Any]
"""Options of a comparison, as plain values: ``rules``, ``seed``, ``seeds``, ``epochs``, ..."""


def seeds_of(options: Options) -> range:
    """Return the seeds with which a comparison trains each rule."""
    return range(options["seed"], options["seed"] + options["seeds"])


def select_runs(options: Options, runs: Sequence[RuleRun]) -> list[RuleRun]:
    """Return the runs whose rule and seed the comparison asks for."""
    seeds = seeds_of(options)
    return [run for run in runs if run.rule in options["rules"] and run.seed in seeds]


def ended_before(folder: Path, options: Options) -> list[RuleRun]:
    """Return the runs in ``folder`` that reached their last epoch, of all rules and seeds.

    Args:
        folder: folder of the comparison.
        options: options of the comparison that continues after them.

    Raises:
        UserError: the runs cannot be read, or were trained with other options.
    """
    runs = _read(folder)
    if trained := _trained(folder, runs):
        _check_options(folder, options, trained)
    return [run for run in runs if len(run.epochs) == options["epochs"]]


def begun(folder: Path) -> list[Key]:
    """Return rules and seeds of the unfinished runs in ``folder`` that have a checkpoint."""
    saved = filter(has_checkpoint, (folder / UNDER_WAY).glob("*_*"))
    names = (path.name.rpartition("_") for path in saved)
    return [(rule, int(seed)) for rule, _, seed in names if seed.isdecimal()]


def keep_options(folder: Path, options: Options, runs: Sequence[RuleRun]) -> None:
    """Write the options with which runs are trained to ``folder``.

    Other rules with a run keep the options that ``folder`` has for them.
    """
    content = {**options, _ORDERS: _orders(options)}
    if former := _trained(folder, runs) - options["rules"].keys():
        before = _options(folder)
        for name in ("rules", _ORDERS):
            others = {k: v for k, v in before.get(name, {}).items() if k in former}
            content[name] = content[name] | others
    write_text(folder / COMPARED, yaml.safe_dump(content, sort_keys=False, allow_unicode=True))


def keep_runs(folder: Path, runs: Sequence[RuleRun]) -> None:
    """Write the tables of ``runs``, which have ended, to ``folder``, and remove their own folders.

    Raises:
        OSError: ``folder`` cannot be written.
    """
    more = {
        "delays.csv": [row for run in runs for row in run.named(run.delays)],
        "notes.csv": [row for run in runs for row in run.named([{"note": n} for n in run.notes])],
    }
    for name, rows in more.items():
        if rows:
            write_csv(folder / name, rows)
    # Last, since a run counts as ended when it is in this file.
    write_csv(folder / ENDED, [row for run in runs for row in run.named(run.epochs)])
    for run in runs:
        shutil.rmtree(under_way(folder, run.rule, run.seed), ignore_errors=True)
    with suppress(OSError):  # other runs are under way
        (folder / UNDER_WAY).rmdir()


def try_keep_runs(folder: Path, runs: Sequence[RuleRun]) -> str:
    """Keep runs as :func:`keep_runs`; return why they cannot be written, or an empty text."""
    why: list[str] = []
    with note_write_errors(why, folder):
        keep_runs(folder, runs)
    return "".join(why)


def under_way(folder: Path, rule: str, seed: int) -> Path:
    """Return the folder of a run of a comparison, which exists until the run has ended."""
    return folder / UNDER_WAY / f"{rule}_{seed}"


def prepare_folder(folder: Path, rule: str, seed: int, *, here: bool = True) -> Path:
    """Return the folder of a run under way, emptied unless it has a checkpoint.

    Args:
        folder: folder of the comparison.
        rule: the run's rule.
        seed: the run's seed.
        here: whether this process writes.
    """
    own = under_way(folder, rule, seed)
    if here and not has_checkpoint(own):
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    return own


def _trained(folder: Path, ended: Sequence[RuleRun]) -> set[str]:
    """The rules with a run in ``ended``, or with one that was saved under way."""
    return {run.rule for run in ended} | {rule for rule, _ in begun(folder)}


def _read(folder: Path) -> list[RuleRun]:
    found: dict[tuple[str, int], RuleRun] = {}
    for name, kept in ((ENDED, "epochs"), ("delays.csv", "delays"), ("notes.csv", "notes")):
        for row in read_csv(folder / name, words=("rule", "note")):
            key = row.pop("rule"), row.pop("seed")
            run = found.setdefault(key, RuleRun(*key, [], []))
            if kept == "notes":
                run.notes.append(row["note"])
            else:
                getattr(run, kept).append(row)
    return [*found.values()]


def _check_options(folder: Path, options: Options, trained: set[str]) -> None:
    """Reject options with which runs would differ from those of the ``trained`` rules."""
    before, rules = _options(folder), options["rules"]
    both = trained & rules.keys()
    others = {f"rules.{rule}" for rule in {*before["rules"], *rules} - both}
    if changed := changed_options(before, options, _FREE | others | {_ORDERS}):
        raise UserError(
            f"resume={folder} has runs that were trained with other options: {changed}; leave them"
            " as they were, or start in a new folder, without resume"
        )
    now, orders = _orders(options), before.get(_ORDERS, {})
    for rule in sorted(both & orders.keys() & now.keys()):
        if orders[rule] != now[rule]:
            raise UserError(
                f"resume={folder} has runs of {rule} that were trained by other orders than those"
                f" in {rules[rule]['file']}: put those back, or start in a new folder, without"
                " resume"
            )


def _orders(options: Options) -> dict[str, str]:
    """The digests of the files of rank orders, by their rules."""
    files = {rule: own.get("file") for rule, own in options["rules"].items()}
    return {
        str(rule): sha256(Path(file).read_bytes()).hexdigest()
        for rule, file in files.items()
        if file
    }


def _options(folder: Path) -> dict[str, Any]:
    found = read_yaml(folder / COMPARED)
    if isinstance(found.get("rules"), dict):
        return found
    raise UserError(
        f"resume={folder} has runs, but no readable {COMPARED} with their options: start in a new"
        " folder, without resume"
    )

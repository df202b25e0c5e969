"""What a comparison keeps in its folder as it goes on: its runs, and their options.

Runs that have ended are in ``runs.csv``, ``delays.csv`` and ``notes.csv``; one that is under way
has a folder of its own for its checkpoints, in ``under_way``. The options that they are trained
with are in ``runs.yaml``, with every rule of which there is a run.
"""

import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from math import isnan
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from toolkit.errors import UserError
from toolkit.files import has_checkpoint, note_write_errors, write_csv, write_text
from toolkit.options import COMPARED, ENDED, INDIFFERENT, UNDER_WAY
from toolkit.results.csv_log import read_csv
from toolkit.training.config_diff import changed_options

# Runs are paired by their seeds, and data may have moved; rules that have run stay as they are.
_FREE = (INDIFFERENT | {"seed", "data.root"}) - {"rules"}

_ORDERS = "orders"  # in the options: digests of rank orders that rules have from files


Key = tuple[str, int]
"""Of a run: its rule and its seed."""


@dataclass(frozen=True)
class RuleRun:
    """One rule with one seed.

    Attributes:
        epochs: their metrics.
        delays: what they were seen to do.
        notes: on what did not go as it should.
        where: how to come to what W&B has of it.
    """

    rule: str
    seed: int
    epochs: list[dict[str, Any]]
    delays: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    where: str = ""

    @property
    def diverged_in(self) -> int | None:
        """The epoch in which its loss diverged; None where it did not."""
        return next((e["epoch"] for e in self.epochs if isnan(e["train_loss"])), None)

    def named(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """``rows`` of this run, with what they are of."""
        return [{"rule": self.rule, "seed": self.seed} | row for row in rows]


def seeds_of(config: DictConfig) -> range:
    """The seeds with which a comparison trains each rule."""
    return range(config.seed, config.seed + config.seeds)


def run_options(config: DictConfig, rule: str, seed: int) -> dict[Any, Any]:
    """The options of one run of a comparison."""
    return {**config, "schedule": config.rules[rule], "seed": seed}


def select_runs(config: DictConfig, runs: Sequence[RuleRun]) -> list[RuleRun]:
    """Return the runs whose rule and seed the comparison asks for."""
    seeds = seeds_of(config)
    return [run for run in runs if run.rule in config.rules and run.seed in seeds]


def ended_before(folder: Path, config: DictConfig) -> list[RuleRun]:
    """The runs in ``folder`` that came to their last epoch, of whichever rules and seeds.

    Args:
        config: of the comparison that goes on after them.

    Raises:
        ValueError: what is left of them cannot be read, or runs were trained with other options.
    """
    runs = _read(folder)
    if trained := _trained(folder, runs):
        _check_options(folder, config, trained)
    return [run for run in runs if len(run.epochs) == config.epochs]


def begun(folder: Path) -> list[Key]:
    """Rules and seeds of the runs in ``folder`` that were saved under way, and have not ended."""
    saved = filter(has_checkpoint, (folder / UNDER_WAY).glob("*_*"))
    names = (path.name.rpartition("_") for path in saved)
    return [(rule, int(seed)) for rule, _, seed in names if seed.isdecimal()]


def keep_options(folder: Path, config: DictConfig, runs: Sequence[RuleRun]) -> None:
    """Have ``folder`` tell with which options runs are trained: those of ``config``.

    Rules that ``config`` lacks keep the options that ``folder`` tells, if there is a run of them.
    """
    options: Any = OmegaConf.to_container(config)
    options[_ORDERS] = _orders(config)
    if former := _trained(folder, runs) - config.rules.keys():
        before: Any = OmegaConf.to_container(_options(folder))
        for kept in ("rules", _ORDERS):
            told = before.get(kept, {})
            options[kept] |= {rule: told[rule] for rule in told if rule in former}
    write_text(folder / COMPARED, OmegaConf.to_yaml(OmegaConf.create(options)))


def keep_runs(folder: Path, runs: Sequence[RuleRun]) -> None:
    """Have ``folder`` hold ``runs``, which have ended, and nothing else of them.

    Raises:
        OSError: it cannot be written.
    """
    more = {
        "delays.csv": [row for run in runs for row in run.named(run.delays)],
        "notes.csv": [row for run in runs for row in run.named([{"note": n} for n in run.notes])],
    }
    for name, rows in more.items():
        if rows:
            write_csv(folder / name, rows)
    # At last: a run that is not in there has not ended.
    write_csv(folder / ENDED, [row for run in runs for row in run.named(run.epochs)])
    for run in runs:
        shutil.rmtree(under_way(folder, run.rule, run.seed), ignore_errors=True)
    with suppress(OSError):  # there are others
        (folder / UNDER_WAY).rmdir()


def try_keep_runs(folder: Path, runs: Sequence[RuleRun]) -> str:
    """Keep runs as :func:`keep_runs`; return why they cannot be written, or an empty text."""
    why: list[str] = []
    with note_write_errors(why, folder):
        keep_runs(folder, runs)
    return "".join(why)


def under_way(folder: Path, rule: str, seed: int) -> Path:
    """The folder of a run of the comparison in ``folder``, until the run has ended."""
    return folder / UNDER_WAY / f"{rule}_{seed}"


def prepare_folder(folder: Path, rule: str, seed: int, *, here: bool = True) -> Path:
    """Return the folder of a run under way, emptied unless it has a checkpoint.

    Args:
        here: whether this process is the one that writes.
    """
    own = under_way(folder, rule, seed)
    if here and not has_checkpoint(own):
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
    return own


def _trained(folder: Path, ended: Sequence[RuleRun]) -> set[str]:
    """The rules of which there is a run: one of those, or one that was saved under way."""
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


def _check_options(folder: Path, config: DictConfig, trained: set[str]) -> None:
    """Refuse options with which runs would differ from those in ``folder``.

    Args:
        trained: the rules of those.
    """
    before = _options(folder)
    both = trained & config.rules.keys()
    others = {f"rules.{rule}" for rule in {*before.rules, *config.rules} - both}
    if told := changed_options(OmegaConf.to_yaml(before), config, _FREE | others | {_ORDERS}):
        raise UserError(
            f"resume={folder} has runs that were trained with other options: {told}; leave them as"
            " they were, or start in a new folder, without resume"
        )
    now, orders = _orders(config), before.get(_ORDERS, {})
    for rule in sorted(both & orders.keys() & now.keys()):
        if orders[rule] != now[rule]:
            raise UserError(
                f"resume={folder} has runs of {rule} that were trained by other orders than those"
                f" in {config.rules[rule].file} by now: put those back, or start in a new folder,"
                " without resume"
            )


def _orders(config: DictConfig) -> dict[str, str]:
    """The digests of the files of rank orders, by their rules."""
    files = {rule: options.get("file") for rule, options in config.rules.items()}
    return {
        str(rule): sha256(Path(file).read_bytes()).hexdigest()
        for rule, file in files.items()
        if file
    }


def _options(folder: Path) -> DictConfig:
    try:
        found = OmegaConf.load(folder / COMPARED)
        if isinstance(found, DictConfig) and isinstance(found.get("rules"), DictConfig):
            return found
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError):
        pass
    raise UserError(
        f"resume={folder} has runs, but no {COMPARED} that tells with which options they were"
        " trained: start in a new folder, without resume"
    )

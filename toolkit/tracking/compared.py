"""What a comparison keeps in its folder as it goes on: its runs, and their options.

Runs that have ended are in ``runs.csv`` and ``delays.csv``; one that is under way has a folder of
its own for its checkpoints, in ``under_way``. The options that they are trained with are in
``runs.yaml``, with every rule of which there is a run.
"""

import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import isnan
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from toolkit.files import write_csv, write_text
from toolkit.options import COMPARED, ENDED, INDIFFERENT, UNDER_WAY
from toolkit.tracking.reading import read_csv
from toolkit.training.changes import changed_options
from toolkit.training.loop import Epoch

# Runs are paired by their seeds, and data may have moved; rules that have run stay as they are.
_FREE = (INDIFFERENT | {"seed", "data.root"}) - {"rules"}

# Of epochs after the loss has diverged these are NaN; averages are of runs that keep any.
_LOST = {f.name for f in fields(Epoch)} - {"ema_loss", "ema_top1"}


@dataclass(frozen=True)
class RuleRun:
    """One rule with one seed.

    Attributes:
        epochs: their metrics.
        delays: what they were seen to do.
        notes: on what could not be tracked.
        where: how to come to what was.
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


def asked_for(config: DictConfig, runs: Sequence[RuleRun]) -> list[RuleRun]:
    """Those of ``runs`` of which the comparison is to tell."""
    seeds = range(config.seed, config.seed + config.seeds)
    return [run for run in runs if run.rule in config.rules and run.seed in seeds]


def ended_before(folder: Path, config: DictConfig) -> list[RuleRun]:
    """The runs in ``folder`` that came to their last epoch, of whichever rules and seeds.

    Args:
        config: of the comparison that goes on after them.

    Raises:
        ValueError: what is left of them cannot be read, or they were trained with other options.
    """
    runs = _read(folder)
    if trained := _trained(folder, runs):
        _check_options(folder, config, trained)
    return [run for run in runs if len(run.epochs) == config.epochs]


def keep_options(folder: Path, config: DictConfig, runs: Sequence[RuleRun]) -> None:
    """Have ``folder`` tell with which options runs are trained: those of ``config``.

    Rules that ``config`` lacks keep the options that ``folder`` tells, if there is a run of them.
    """
    options: Any = OmegaConf.to_container(config)
    if former := _trained(folder, runs) - options["rules"].keys():
        before = _options(folder).rules
        options["rules"] |= {rule: before[rule] for rule in before if rule in former}
    write_text(folder / COMPARED, OmegaConf.to_yaml(OmegaConf.create(options)))


def keep_runs(folder: Path, runs: Sequence[RuleRun]) -> None:
    """Have ``folder`` hold ``runs``, which have ended, and nothing else of them."""
    write_csv(folder / ENDED, [row for run in runs for row in run.named(run.epochs)])
    if delays := [row for run in runs for row in run.named(run.delays)]:
        write_csv(folder / "delays.csv", delays)
    for run in runs:
        shutil.rmtree(under_way(folder, run.rule, run.seed), ignore_errors=True)
    with suppress(OSError):  # there are others
        (folder / UNDER_WAY).rmdir()


def under_way(folder: Path, rule: str, seed: int) -> Path:
    """The folder of a run of the comparison in ``folder``, until the run has ended."""
    return folder / UNDER_WAY / f"{rule}_{seed}"


def _trained(folder: Path, ended: Iterable[RuleRun]) -> set[str]:
    """The rules of which ``folder`` has a run: one of those, or one that was saved under way."""
    saved = folder.glob(f"{UNDER_WAY}/*/checkpoints")
    return {run.rule for run in ended} | {path.parent.name.rpartition("_")[0] for path in saved}


def _read(folder: Path) -> list[RuleRun]:
    found: dict[tuple[str, int], RuleRun] = {}
    for name, kept in ((ENDED, "epochs"), ("delays.csv", "delays")):
        for row in read_csv(folder / name, words=("rule",)):
            key = row.pop("rule"), int(row.pop("seed"))
            known = {
                k: None if isnan(value) and k not in _LOST else value for k, value in row.items()
            }
            whole = {k: int(row[k]) for k in ("epoch", "step", "stage") if k in row}
            run = found.setdefault(key, RuleRun(*key, [], []))
            getattr(run, kept).append(known | whole)
    return list(found.values())


def _check_options(folder: Path, config: DictConfig, trained: set[str]) -> None:
    """Refuse options with which runs would differ from those in ``folder``.

    Args:
        trained: the rules of those.
    """
    before = _options(folder)
    both = trained & config.rules.keys()
    others = {f"rules.{rule}" for rule in {*before.rules, *config.rules} - both}
    if told := changed_options(OmegaConf.to_yaml(before), config, _FREE | others):
        raise ValueError(
            f"resume={folder} has runs that were trained with other options: {told}; leave them as"
            " they were, or start in a new folder, without resume"
        )


def _options(folder: Path) -> DictConfig:
    try:
        found = OmegaConf.load(folder / COMPARED)
        if isinstance(found, DictConfig) and isinstance(found.get("rules"), DictConfig):
            return found
    except (OSError, UnicodeDecodeError, OmegaConfBaseException, YAMLError):
        pass
    raise ValueError(
        f"resume={folder} has runs, but no {COMPARED} that tells with which options they were"
        " trained: start in a new folder, without resume"
    )

"""Runs that differ in their seed alone, what they are called, and what they compare with."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.options import INDIFFERENT, differing, flat, without
from toolkit.results.collect import flat_options
from toolkit.results.run_record import Run
from toolkit.results.schedule_from_config import rebuild_schedule

# Runs are paired by their seeds, under rules; what one runtime or another takes is reported, too.
_FREE = (INDIFFERENT | {"seed", "schedule"}) - {"runtime"}
_MOST_OPTIONS = 3  # in a name


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
        label: the schedule's name, and what else sets it apart within its comparison.
        comparison: what is trained on what, and how: groups of the same one can be compared.
        runs: of every state.
    """

    label: str
    comparison: str
    runs: Sequence[Run]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @property
    def counting(self) -> list[Run]:
        return [run for run in self.runs if run.counts]

    @property
    def n_diverged(self) -> int:
        """Runs whose loss diverged, and that so do not count."""
        return sum(run.diverged and not run.counts for run in self.runs)

    @property
    def by_seed(self) -> dict[int, Run]:
        """The runs that count, one a seed: of several the one that started last."""
        found: dict[int, Run] = {}
        for run in sorted(self.counting, key=lambda run: str(run.provenance.get("started"))):
            if run.seed is not None:
                found[run.seed] = run
        return dict(sorted(found.items()))

    @property
    def n_repeated(self) -> int:
        """Runs that repeat a seed."""
        return len([run for run in self.counting if run.seed is not None]) - len(self.by_seed)

    def full_label(self, groups: "Sequence[Group]") -> str:
        """Its label, with its comparison where ``groups`` has several."""
        several = len({group.comparison for group in groups}) > 1
        return f"{self.label} ({self.comparison})" if several else self.label

    @property
    def summed(self) -> Run | None:
        """The means over seeds, where runs have not been kept by themselves."""
        means = (r for r in self.counting if r.seed is None and r.kind == "compare")
        return next(means, None)


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The training runs that tell their configuration, comparison by comparison.

    Rules that share all other options are compared with each other. Configurations that have no
    such company are compared over their options, if they train the same model on the same data.
    """
    settings: dict[str, dict[str, dict[str, list[Run]]]] = {}
    for run in runs:
        if run.trains and isinstance(run.config.get("schedule"), dict):
            alone = str(run.folder) if run.seed is None else ""
            schedule = json.dumps([run.config["schedule"], alone], default=str)
            of_task = settings.setdefault(_task(run), {})
            of_task.setdefault(_setting(run) + alone, {}).setdefault(schedule, []).append(run)
    found: list[Group] = []
    for task, of_task in settings.items():
        rules = [sorted(same.values(), key=_late) for same in of_task.values() if len(same) > 1]
        others = [*(same for by in of_task.values() if len(by) == 1 for same in by.values())]
        shared = [of_rule[0] for of_rule in rules]
        for same in rules:
            name = _named(task, same[0], shared)
            if any(group.comparison == name for group in found):
                name = f"{name} ({same[0][0].folder.name})"
            found += _groups(name, same, [_schedule(one) for one in same])
        if others:
            name = f"{task}, other options" if rules else task
            names = [_named(_schedule(one), one, others) for one in others]
            found += _groups(name, others, names)
    return found


def _groups(comparison: str, found: Sequence[Sequence[Run]], names: Sequence[str]) -> list[Group]:
    """What has the name of another is told apart by its rule, or by its folder."""
    for tell in (lambda run: run.rule, lambda run: run.folder.name):
        names = [
            name if names.count(name) == 1 else f"{name} ({tell(same[0])})"
            for name, same in zip(names, found, strict=True)
        ]
    return [Group(name, comparison, same) for name, same in zip(names, found, strict=True)]


def _named(name: str, own: Sequence[Run], all_: Sequence[Sequence[Run]]) -> str:
    """``name`` and the first options in which ``own`` is unlike some of the others."""
    options = [_options(same[0]) for same in all_]
    mine = _options(own[0])
    told = [option for option in differing(options) if option in mine][:_MOST_OPTIONS]
    return ", ".join([name, *(f"{_short(option)} {mine[option]}" for option in told)])


def _short(option: str) -> str:
    """``lr`` of ``optimizer.lr``."""
    return {"microbatches": "micro-batches"}.get(option, option.rpartition(".")[2])


def _options(run: Run) -> dict[str, Any]:
    """The options that matter, but for the schedule's."""
    return _mattering(flat_options(run.config))


def _setting(run: Run) -> str:
    return json.dumps(_mattering(flat(run.config)), sort_keys=True, default=str)


def _mattering(options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the folder of the data its name: elsewhere they are the same, and of another name not."""
    found = without(options, _FREE)
    root = found.get("data.root")
    return found | {"data.root": Path(root).name} if isinstance(root, str) else found


def _task(run: Run) -> str:
    options = flat_options(run.config)
    return f"{options.get('model', 'a model')} on {options.get('data', 'data')}"


def _late(same: Sequence[Run]) -> bool:
    """Whether it reads old weights; what does not is what the others are compared with."""
    options = same[0].config["schedule"]
    try:
        return rebuild_schedule(options).max_staleness > 0
    except ValueError:
        return bool(options.get("delay", 0) != 0)


def _schedule(same: Sequence[Run]) -> str:
    return same[0].schedule or same[0].rule or "schedule"

"""Groups of runs that differ in their seed alone, their labels and comparisons."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.options import INDIFFERENT, differing, flat, without
from toolkit.results.collect import flat_options
from toolkit.results.run_record import Run
from toolkit.results.schedule_from_config import rebuild_schedule

# Rules are paired by seeds. The runtime changes no result, but a report compares its speed.
_FREE = (INDIFFERENT | {"seed", "schedule"}) - {"runtime"}
_MOST_OPTIONS = 3  # in a label

Runs = list[Run]
"""Runs of one configuration."""


@dataclass(frozen=True)
class Group:
    """Runs of one configuration.

    Attributes:
        label: the schedule's name, and what else distinguishes it within its comparison.
        comparison: the model, data and options; groups with the same one can be compared.
        runs: runs of every state.
    """

    label: str
    comparison: str
    runs: Sequence[Run]

    @property
    def config(self) -> Mapping[str, Any]:
        """The options of the first run."""
        return self.runs[0].config

    @property
    def counting(self) -> Runs:
        """Runs with a final result."""
        return [run for run in self.runs if run.counts]

    @property
    def n_diverged(self) -> int:
        """Number of runs whose loss diverged."""
        return sum(run.diverged and not run.counts for run in self.runs)

    @property
    def by_seed(self) -> dict[int, Run]:
        """The counting run of each seed that started last."""
        found: dict[int, Run] = {}
        for run in sorted(self.counting, key=lambda run: str(run.provenance.get("started"))):
            if run.seed is not None:
                found[run.seed] = run
        return dict(sorted(found.items()))

    @property
    def n_repeated(self) -> int:
        """Number of counting runs that repeat a seed."""
        return len([run for run in self.counting if run.seed is not None]) - len(self.by_seed)

    @property
    def means(self) -> Run | None:
        """The means over seeds of a comparison that kept no single runs."""
        means = (r for r in self.counting if r.seed is None and r.kind == "compare")
        return next(means, None)

    def full_label(self, groups: "Sequence[Group]") -> str:
        """The label, with the comparison if ``groups`` has several."""
        several = len({group.comparison for group in groups}) > 1
        return f"{self.label} ({self.comparison})" if several else self.label


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group the training runs with a known schedule, comparison by comparison.

    Rules that share all other options are one comparison. The other configurations of a model and
    data set are compared over their options.
    """
    tasks: dict[str, dict[str, dict[str, Runs]]] = {}
    for run in runs:
        if run.trains and isinstance(run.config.get("schedule"), dict):
            alone = str(run.folder) if run.seed is None else ""
            options = json.dumps(_relevant(flat(run.config)), sort_keys=True, default=str) + alone
            schedule = json.dumps([run.config["schedule"], alone], default=str)
            by_options = tasks.setdefault(_task(run), {})
            by_options.setdefault(options, {}).setdefault(schedule, []).append(run)
    groups: list[Group] = []
    for task, by_options in tasks.items():
        rules = [
            sorted(same.values(), key=_is_late) for same in by_options.values() if len(same) > 1
        ]
        others = [runs for same in by_options.values() if len(same) == 1 for runs in same.values()]
        firsts = [same[0] for same in rules]
        for same in rules:
            name = _label(task, same[0], firsts)
            if any(group.comparison == name for group in groups):
                name = f"{name} ({same[0][0].folder.name})"
            groups += _distinguish(name, same, [_schedule(runs) for runs in same])
        if others:
            name = f"{task}, other options" if rules else task
            labels = [_label(_schedule(runs), runs, others) for runs in others]
            groups += _distinguish(name, others, labels)
    return groups


def _distinguish(comparison: str, found: Sequence[Runs], labels: Sequence[str]) -> list[Group]:
    """Groups whose equal labels have the rule appended, or else the folder."""
    rule_or_folder: tuple[Callable[[Run], object], ...] = (
        lambda run: run.rule,
        lambda run: run.folder.name,
    )
    for describe in rule_or_folder:
        labels = [
            label if labels.count(label) == 1 else f"{label} ({describe(runs[0])})"
            for label, runs in zip(labels, found, strict=True)
        ]
    return [Group(label, comparison, runs) for label, runs in zip(labels, found, strict=True)]


def _label(name: str, own: Runs, all_: Sequence[Runs]) -> str:
    """``name`` with the first options in which ``own`` differs from others."""
    options = [_relevant(flat_options(runs[0].config)) for runs in all_]
    mine = _relevant(flat_options(own[0].config))
    shown = [option for option in differing(options) if option in mine][:_MOST_OPTIONS]
    return ", ".join([name, *(f"{_short(option)} {mine[option]}" for option in shown)])


def _short(option: str) -> str:
    """``lr`` of ``optimizer.lr``."""
    return {"microbatches": "micro-batches"}.get(option, option.rpartition(".")[2])


def _relevant(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that distinguish configurations; of the data's folder only its name."""
    found = without(options, _FREE)
    root = found.get("data.root")
    return found | {"data.root": Path(root).name} if isinstance(root, str) else found


def _task(run: Run) -> str:
    options = flat_options(run.config)
    return f"{options.get('model', 'a model')} on {options.get('data', 'data')}"


def _is_late(runs: Runs) -> bool:
    """Whether a schedule reads old weights; the first one that does not is the baseline."""
    options = runs[0].config["schedule"]
    try:
        return rebuild_schedule(options).max_staleness > 0
    except ValueError:
        return bool(options.get("delay", 0) != 0)


def _schedule(runs: Runs) -> str:
    return runs[0].schedule or runs[0].rule or "schedule"

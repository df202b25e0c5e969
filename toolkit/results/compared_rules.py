"""The rules of a comparison side by side: a row for each, their labels, and notes on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.results.comparison import RuleRun
from toolkit.results.statistics import over_seeds
from toolkit.results.tuning import edge_notes
from toolkit.schedule import Schedule, labels, steady_state


@dataclass(frozen=True)
class ComparedRules:
    """Rules, their runs, and what they are compared by.

    Attributes:
        schedules: by rule; all are compared with the first.
        runs: of all rules and seeds.
        measure: metric by which trained models are judged.
        rates: learning rate by rule.
        margin: within which a rule is equivalent to the first; None: this is not tested.
        tuning: a row for each learning rate that was tried.
    """

    schedules: Mapping[str, Schedule]
    runs: Sequence[RuleRun]
    measure: Metric
    rates: Mapping[str, float]
    margin: float | None = None
    tuning: Sequence[dict[str, Any]] = ()

    @property
    def labels(self) -> dict[str, str]:
        """By rule, what tables call it."""
        return _labels_of(self.schedules)

    @property
    def baseline(self) -> str:
        """The rule that all are compared with."""
        return next(iter(self.schedules))

    def runs_of(self, rule: str) -> list[RuleRun]:
        """Return the runs of a rule."""
        return [run for run in self.runs if run.rule == rule]

    def curves_of(self, rule: str) -> list[list[float]]:
        """Return the metric of each epoch, of each run of a rule."""
        return [
            [self.measure.factor * epoch[self.measure.key] for epoch in run.epochs]
            for run in self.runs_of(rule)
        ]

    def row(self, rule: str) -> dict[str, Any]:
        """Return a row: metrics of a rule's last epochs, their differences, and its costs."""
        schedule = self.schedules[rule]
        steady = steady_state(schedule)
        row: dict[str, Any] = {"rule": rule, "schedule": schedule.name}
        row["diverged"] = sum(run.diverged_in is not None for run in self.runs_of(rule))
        for measure in (ACCURACY, LOSS):
            row |= over_seeds(
                self._last_values(rule, measure),
                self._last_values(self.baseline, measure),
                measure,
                self.margin if measure == self.measure else None,
            )
        return row | {
            "staleness_mean": schedule.mean_staleness,
            "staleness_max": schedule.max_staleness,
            "peak_activations": steady.peak_activations / schedule.n_stages,
            "traffic_mean": float(mean(steady.units_by_slot)),
            "traffic_max": float(max(steady.units_by_slot)),
            "lr": self.rates[rule],
        }

    def _last_values(self, rule: str, measure: Metric) -> dict[int, float]:
        """Return a metric of a rule's last epochs, by seed."""
        return {
            run.seed: measure.factor * run.epochs[-1][measure.key]
            for run in self.runs_of(rule)
        }

    def notes(self) -> list[str]:
        """Return notes on runs, and on rules by which a loss has diverged."""
        notes = []
        for rule, label in self.labels.items():
            diverged = [
                f"seed {run.seed} in epoch {run.diverged_in}"
                for run in self.runs_of(rule)
                if run.diverged_in is not None
            ]
            if diverged:
                notes.append(
                    f"{label}: the loss diverged ({', '.join(diverged)}), which counts in no mean;"
                    " lower optimizer.lr, or warm up with lr.warmup_epochs"
                )
        notes += edge_notes(self.tuning)
        for run in self.runs:
            notes += run.notes
        return notes

    def unlike_schedules(self) -> list[Schedule]:
        """Return the schedules, each once; equal names get the names of their rules."""
        first_rules: dict[str, Schedule] = {}
        for rule, schedule in self.schedules.items():
            if schedule not in first_rules.values():
                first_rules[rule] = schedule
        label_of_rule = _labels_of(first_rules)
        return [
            replace(schedule, name=label_of_rule[rule])
            for rule, schedule in first_rules.items()
        ]


def batch_size_notes(schedules: Mapping[str, Schedule], batch: int) -> list[str]:
    """Return a note if a training step of some rules takes more samples than that of others.

    Args:
        schedules: by rule.
        batch: samples of a micro-batch.
    """
    batch_sizes = {
        label: batch * schedules[rule].n_microbatches
        for rule, label in _labels_of(schedules).items()
    }
    if len(set(batch_sizes.values())) == 1:
        return []
    sizes = ", ".join(
        f"{label} {n_samples}" for label, n_samples in batch_sizes.items()
    )
    return [
        f"training steps differ in their samples ({sizes}), so not by their rules alone"
    ]


def _labels_of(schedules: Mapping[str, Schedule]) -> dict[str, str]:
    return labels({rule: schedule.name for rule, schedule in schedules.items()})

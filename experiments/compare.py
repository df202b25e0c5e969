"""The same training under several rules: accuracy, memory and traffic, side by side.

    cyclic-dp compare experiment=digits
    cyclic-dp compare experiment=paper/cifar10_resnet18 data.root=/path workers=8

More rules: +schedule@rules.cdp_late=cdp_v1 rules.cdp_late.delay=2; fewer: ~rules.cdp_v1. All rules
are compared with the first that is left.

A rule may have its own optimizer, lr, clip, ema and readout: +own.cdp_v1.optimizer.lr=0.05,
+optimizer@own.cdp_v1.optimizer=nadam. tune.rates=[0.5,1,2] tries each rule at these factors on its
optimizer.lr, for tune.epochs epochs with tune.seed, and trains it at the best, by the test metric
after the last epoch.

parallel=8 trains up to 8 runs at the same time on the one device, each in a process of its own.
Only seconds differ from those of parallel=1:

    cyclic-dp compare experiment=cifar10_short data.root=/path device=cuda parallel=8

An interrupted comparison continues with the unfinished run and then the others. Seeds and rules can
be added; all other options stay as before:

    cyclic-dp compare resume=outputs/compare/... seeds=8
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli import (
    EXIT_STOPPED,
    Ended,
    build_schedule,
    entry_point,
    is_rank_zero,
    load_samples,
    output_folder,
    settle_delays,
)
from toolkit.cli.instantiate import plain
from toolkit.cli.runs import RuleBuilder, check_comparison, join_world, rule_config
from toolkit.files import note_write_errors
from toolkit.format import (
    count,
    delay_table,
    metric_cells,
    peak_cells,
    rate_cells,
    staleness_cells,
    table,
)
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.options import TuneOptions
from toolkit.results.run_files import TUNING_FOLDER
from toolkit.schedule import Schedule, labels
from toolkit.terminal import show, show_activity, show_import

if TYPE_CHECKING:
    from toolkit.results.comparison import RuleRun
    from toolkit.runtime import World
    from toolkit.training.data import SampleSet


@dataclass
class Trained:
    """The runs of a comparison."""

    runs: list["RuleRun"]
    notes: list[str] = field(default_factory=list)
    unwritten: str = ""  # why runs that have ended are not on the disk


@entry_point("compare")
def main(config: DictConfig) -> Ended:
    show_import()
    from toolkit.results.provenance import resume_command
    from toolkit.results.statistics import check_margin
    from toolkit.results.tuning import trials, tried, with_best
    from toolkit.training import StoppedError

    # 1. Check all options before the first run.
    check_margin(config.margin)
    check_comparison(config)
    start = time.perf_counter()
    folder = output_folder()
    show_activity("reading the data")
    load = cache(partial(load_samples, config.data))
    settle_delays(config, lambda: load().form)
    schedules = {
        rule: build_schedule(options) for rule, options in config.rules.items()
    }
    world = join_world(config, next(iter(schedules.values())))
    options = plain(config)
    samples = load()
    measure = samples.form.metric
    notes = batch_size_notes(schedules, config.batch)
    print_notes(notes)

    # 2. Try learning rates, if asked, and train.
    tuning: list[dict[str, Any]] = []
    try:
        if TuneOptions(**options["tune"]).rates:
            tried_runs = train(
                OmegaConf.create(trials(options)),
                folder / TUNING_FOLDER,
                samples,
                world,
            )
            tuning = tried(options, tried_runs.runs, measure)
            if tried_runs.unwritten:
                notes.append(tried_runs.unwritten)
            config = OmegaConf.create({**config, "own": with_best(options, tuning)})
        trained = train(config, folder, samples, world)
    except StoppedError as stopped:
        if is_rank_zero():
            lost = ""
            if not stopped.saved:
                lost = "the run under way is not saved; "
            show(f"stopped by {stopped}; {lost}it continues by:", file=sys.stderr)
            show(f"  {resume_command(folder)}", file=sys.stderr)
        return Ended(EXIT_STOPPED)
    if not is_rank_zero():
        return Ended()

    # 3. Compare.
    notes = [*trained.notes, *notes]
    if trained.unwritten:
        notes.append(trained.unwritten)
    seconds = time.perf_counter() - start
    comparison = Comparison(config, schedules, trained.runs, measure, tuning)
    is_written = conclude(comparison, notes, seconds)
    return Ended(0 if is_written and not trained.unwritten else 1)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, once for all ranks."""
    if is_rank_zero():
        for note in notes:
            show(f"note: {note}")


def train(
    config: DictConfig, folder: Path, samples: "SampleSet", world: "World | None"
) -> Trained:
    """Train the runs of a comparison that have not ended in ``folder``; return all of its runs."""
    from toolkit.plan.rate_check import check_rate
    from toolkit.results import comparison
    from toolkit.results.parallel_runs import check_parallel_runs, train_in_parallel
    from toolkit.training import TrainingRun

    options = plain(config)
    make_run = RuleBuilder(options, samples)
    are_trials = folder.name == TUNING_FOLDER
    unchecked_rules = set[str]()  # whose learning rates may be far too large
    if config.stability and not config.resume and not are_trials and is_rank_zero():
        unchecked_rules = {*config.rules}

    def build_run(rule: str, seed: int) -> TrainingRun:
        run = make_run(rule, seed)
        if rule in unchecked_rules and (warning := check_rate(run)):
            trained.notes.append(warning)
            show(f"warning: {warning}", file=sys.stderr)
        unchecked_rules.discard(rule)
        return run

    runs, saved_keys = comparison.runs_so_far(options, folder, world)
    trained = Trained(runs)
    n_before = len(runs)
    n_ended = len(comparison.select_runs(options, runs))
    if n_ended:
        ended = count(n_ended, "trial" if are_trials else "run")
        trained.notes.append(f"resumed: {ended} had ended before, and take no seconds")
    if n_before > n_ended:
        trained.notes.append(
            f"runs.csv has {n_before - n_ended} more, of other rules or seeds"
        )
    print_notes(trained.notes)

    keys = comparison.unfinished(options, runs, saved_keys)
    n_processes = min(config.parallel, len(keys))
    if n_processes > 1:
        trained.notes.append(
            f"up to {n_processes} runs trained at the same time and shared the device, so the"
            " samples/s of each are lower than alone"
        )
        for note in check_parallel_runs(options, build_run, keys, n_processes):
            show(f"note: {note}")
        new_runs = train_in_parallel(
            options, RuleBuilder(options), folder, keys, n_processes
        )
    else:
        new_runs = comparison.train_all(
            options, build_run, folder, runs, saved_keys, world
        )
    for new_run in new_runs:
        # Runs that train at the same time end in any order.
        runs[n_before:] = sorted(
            [*runs[n_before:], new_run],
            key=lambda run: keys.index((run.rule, run.seed)),
        )
        if is_rank_zero():
            last_warning = trained.unwritten
            trained.unwritten = comparison.try_keep_runs(folder, runs)
            if trained.unwritten not in ("", last_warning):
                show(
                    f"warning: {trained.unwritten}; training continues", file=sys.stderr
                )
    trained.runs = comparison.select_runs(options, runs)
    return trained


@dataclass(frozen=True)
class Comparison:
    """The runs of a comparison, and what they are compared by."""

    config: DictConfig
    schedules: dict[str, Schedule]  # by rule
    runs: list["RuleRun"]
    measure: Metric  # by which trained models are judged
    tuning: list[dict[str, Any]]  # a row a learning rate that was tried

    @property
    def labels(self) -> dict[str, str]:
        """By rule, what tables call it."""
        return labels_of(self.schedules)

    @property
    def baseline(self) -> str:
        """The rule that all are compared with."""
        return next(iter(self.schedules))

    def runs_of(self, rule: str) -> list["RuleRun"]:
        """Return the runs of a rule."""
        return [run for run in self.runs if run.rule == rule]

    def last_values(self, rule: str, measure: Metric) -> dict[int, float]:
        """Return a metric of a rule's last epochs, by seed."""
        return {
            run.seed: measure.factor * run.epochs[-1][measure.key]
            for run in self.runs_of(rule)
        }

    def row(self, rule: str) -> dict[str, Any]:
        """Return a row: metrics of a rule's last epochs, their differences, and its costs."""
        from toolkit.results import over_seeds
        from toolkit.schedule import steady_state

        schedule = self.schedules[rule]
        steady = steady_state(schedule)
        row: dict[str, Any] = {"rule": rule, "schedule": schedule.name}
        row["diverged"] = sum(run.diverged_in is not None for run in self.runs_of(rule))
        for measure in (ACCURACY, LOSS):
            margin = None
            if measure == self.measure:
                margin = self.config.margin
            values = self.last_values(rule, measure)
            row |= over_seeds(
                values, self.last_values(self.baseline, measure), measure, margin
            )
        return row | {
            "staleness_mean": schedule.mean_staleness,
            "staleness_max": schedule.max_staleness,
            "peak_activations": steady.peak_activations / schedule.n_stages,
            "traffic_mean": float(mean(steady.units_by_slot)),
            "traffic_max": float(max(steady.units_by_slot)),
            "lr": rule_config(self.config, rule, self.config.seed).optimizer.lr,
        }

    def run_notes(self) -> list[str]:
        """Return notes on runs, and on rules by which a loss has diverged."""
        from toolkit.results.tuning import edge_notes

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


def conclude(comparison: Comparison, notes: list[str], seconds: float) -> bool:
    """Print and write the results of all runs; return whether they could be written."""
    from toolkit.figures import save, schedules
    from toolkit.figures.curves_figure import over_epochs
    from toolkit.results import delay_means, describe, write_result
    from toolkit.results.tracker import where_tracked
    from toolkit.results.wandb_run import track_differences
    from toolkit.training import pick_device

    folder = output_folder()
    config, runs, measure = comparison.config, comparison.runs, comparison.measure
    rows = [comparison.row(rule) for rule in comparison.schedules]
    has_rates = len({row["lr"] for row in rows}) > 1 or bool(comparison.tuning)
    table_rows = []
    curves: dict[str, list[list[float]]] = {}
    for row in rows:
        label = comparison.labels[row["rule"]]
        if row["diverged"]:
            label += f" ({row['diverged']} of {config.seeds} diverged)"
        if rule_runs := comparison.runs_of(row["rule"]):
            curves[label] = [
                [measure.factor * epoch[measure.key] for epoch in run.epochs]
                for run in rule_runs
            ]
        cells = {"rule": label}
        if has_rates:
            cells |= rate_cells(row)
        cells |= metric_cells(row, measure, comparison.labels[comparison.baseline])
        table_rows.append(cells | staleness_cells(row) | peak_cells(row))
    delay_rows = [row for run in runs for row in run.named(run.delays)]
    delays = delay_means(delay_rows, ["rule", "stage"])

    if comparison.tuning:
        show(f"\n{table(comparison.tuning)}\n")
    show(f"\n{table(table_rows)}\n")
    if delays:
        show(f"{delay_table(delays, comparison.labels)}\n")
    legend = _LEGEND.format(seeds=config.seeds, by=measure)
    if config.margin is not None:
        legend += _VERDICTS
    show(legend)

    run_notes = comparison.run_notes()
    result_fields: dict[str, Any] = {
        "judged_by": measure.name,
        "notes": [*dict.fromkeys([*notes, *run_notes])],
        "delays": delays,
    }
    if comparison.tuning:
        result_fields["tuning"] = comparison.tuning
    device = describe(pick_device(config.device))
    unwritten: list[str] = []
    with note_write_errors(unwritten, folder):
        write_result(
            folder, "comparison", rows, config, device, seconds, **result_fields
        )
        save(over_epochs(curves, measure), folder / measure.name)
        save(schedules(unlike_schedules(comparison.schedules)), folder / "schedules")
    for note in dict.fromkeys([*run_notes, *unwritten]):
        show(f"note: {note}")
    if not unwritten:
        show(
            f"written to {folder}: {measure.name}.png, schedules.png, result.json, ..."
        )
    places = [run.where for run in runs if run.where]
    if places:
        track_differences(
            plain(config),
            folder,
            device=device,
            rows=rows,
            labels=comparison.labels,
            metric=measure,
        )
        show(where_tracked(places, folder))
    return not unwritten


_LEGEND = """\
{by.name}: of the last epoch, mean and standard deviation over {seeds} seeds
difference: paired by seed, in {by.unit_of_differences}, with a 95 % interval
staleness: steps by which weights are late, over stages and micro-batches
peak activations: of all workers, in micro-batches; 1 is all activations of one
traffic: all workers together, in stages' parameters
"""
_VERDICTS = """\
at a margin: what two one-sided paired t-tests at 5 % show; p: the larger one
"""


def unlike_schedules(schedules: dict[str, Schedule]) -> list[Schedule]:
    """Return the schedules of rules, each once; equal names get the names of their rules."""
    first_rules: dict[str, Schedule] = {}
    for rule, schedule in schedules.items():
        if schedule not in first_rules.values():
            first_rules[rule] = schedule
    label_of_rule = labels_of(first_rules)
    return [
        replace(schedule, name=label_of_rule[rule])
        for rule, schedule in first_rules.items()
    ]


def labels_of(schedules: dict[str, Schedule]) -> dict[str, str]:
    """Return by rule what tables call its schedule."""
    return labels({rule: schedule.name for rule, schedule in schedules.items()})


def batch_size_notes(schedules: dict[str, Schedule], batch: int) -> list[str]:
    """Return a note if a training step of some rules takes more samples than that of others."""
    batch_sizes = {
        label: batch * schedules[rule].n_microbatches
        for rule, label in labels_of(schedules).items()
    }
    if len(set(batch_sizes.values())) == 1:
        return []
    sizes = ", ".join(
        f"{label} {n_samples}" for label, n_samples in batch_sizes.items()
    )
    return [
        f"training steps differ in their samples ({sizes}), so not by their rules alone"
    ]


if __name__ == "__main__":
    main()

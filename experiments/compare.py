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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
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
from toolkit.options import TuneOptions
from toolkit.results.run_files import TUNING_FOLDER
from toolkit.terminal import show, show_activity, show_import

if TYPE_CHECKING:
    from toolkit.results.compared_rules import ComparedRules
    from toolkit.results.comparison import RuleRun
    from toolkit.runtime import World
    from toolkit.training import StoppedError, TrainingRun
    from toolkit.training.data import SampleSet

    BuildRun = Callable[[str, int], TrainingRun]  # of a rule and a seed


@dataclass
class Trained:
    """The runs of a comparison."""

    runs: list["RuleRun"]
    notes: list[str] = field(default_factory=list)
    unwritten: str = ""  # why runs that have ended are not on the disk


@entry_point("compare")
def main(config: DictConfig) -> Ended:
    show_import()
    from toolkit.results.compared_rules import ComparedRules, batch_size_notes
    from toolkit.results.statistics import check_margin
    from toolkit.results.tuning import trials, tried, with_best
    from toolkit.training import StoppedError

    # 1. Check all options before the first run.
    check_margin(config.margin)
    check_comparison(config)
    start = time.perf_counter()
    folder = output_folder()
    show_activity("reading the data")
    # Read once: for delays that links afford, and for all runs.
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
        # The trials are a comparison of their own, in a folder below: it resumes like any other.
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
        print_stop(stopped, folder)
        return Ended(EXIT_STOPPED)
    if not is_rank_zero():
        return Ended()

    # 3. Compare.
    notes = [*trained.notes, *notes]
    if trained.unwritten:
        notes.append(trained.unwritten)
    seconds = time.perf_counter() - start
    rates = {
        rule: rule_config(config, rule, config.seed).optimizer.lr for rule in schedules
    }
    comparison = ComparedRules(
        schedules, trained.runs, measure, rates, config.margin, tuning
    )
    is_written = conclude(comparison, config, notes, seconds)
    return Ended(0 if is_written and not trained.unwritten else 1)


def print_stop(stopped: "StoppedError", folder: Path) -> None:
    """Print, once for all ranks, why the comparison ends and how it continues."""
    from toolkit.cli.resume import trust_option
    from toolkit.results.provenance import resume_command

    if is_rank_zero():
        lost = "" if stopped.saved else "the run under way is not saved; "
        show(f"stopped by {stopped}; {lost}it continues by:", file=sys.stderr)
        command = resume_command(folder) + trust_option(folder, "compare")
        show(f"  {command}", file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, once for all ranks."""
    if is_rank_zero():
        for note in notes:
            show(f"note: {note}")


def train(
    config: DictConfig, folder: Path, samples: "SampleSet", world: "World | None"
) -> Trained:
    """Train the runs of a comparison that have not ended in ``folder``; return all of its runs."""
    from toolkit.results import comparison
    from toolkit.results.parallel_runs import check_parallel_runs, train_in_parallel

    options = plain(config)
    runs, saved_keys = comparison.runs_so_far(options, folder, world)
    trained = Trained(runs)
    n_before = len(runs)
    n_ended = len(comparison.select_runs(options, runs))
    are_trials = folder.name == TUNING_FOLDER
    if n_ended:
        ended = count(n_ended, "trial" if are_trials else "run")
        trained.notes.append(f"resumed: {ended} had ended before, and take no seconds")
    if n_before > n_ended:
        trained.notes.append(
            f"runs.csv has {n_before - n_ended} more, of other rules or seeds"
        )
    print_notes(trained.notes)

    build_run: BuildRun = RuleBuilder(options, samples)
    # Trials take rates that are too large on purpose, and resumed runs had their warning.
    if config.stability and not config.resume and not are_trials and is_rank_zero():
        build_run = with_rate_checks(build_run, trained.notes)
    # Of each seed all rules come before the next seed: a comparison that is stopped has pairs.
    keys = comparison.unfinished(options, runs, saved_keys)
    n_processes = min(config.parallel, len(keys))
    if n_processes > 1:
        trained.notes.append(
            f"up to {n_processes} runs trained at the same time and shared the device, so the"
            " samples/s of each are lower than alone"
        )
        for note in check_parallel_runs(options, build_run, keys, n_processes):
            show(f"note: {note}")
        # Each process loads the samples for itself: they are not pickled.
        new_runs = train_in_parallel(
            options, RuleBuilder(options), folder, keys, n_processes
        )
    else:
        new_runs = comparison.train_all(
            options, build_run, folder, runs, saved_keys, world
        )
    for new_run in new_runs:
        # After each run all that have ended are written, so that an interruption costs one run.
        # Runs that train at the same time end in any order.
        runs[n_before:] = sorted(
            [*runs[n_before:], new_run],
            key=lambda run: keys.index((run.rule, run.seed)),
        )
        if is_rank_zero():
            last_warning = trained.unwritten
            trained.unwritten = comparison.try_keep_runs(folder, runs)
            # Print the same reason once, and not after each run.
            if trained.unwritten not in ("", last_warning):
                show(
                    f"warning: {trained.unwritten}; training continues", file=sys.stderr
                )
    trained.runs = comparison.select_runs(options, runs)
    return trained


def with_rate_checks(build_run: "BuildRun", notes: list[str]) -> "BuildRun":
    """Return ``build_run``, which also warns of a rule's learning rate if it is far too large.

    Args:
        build_run: builds a run of a rule with a seed.
        notes: to which warnings are added.
    """
    from toolkit.plan.rate_check import check_rate

    checked_rules = set[str]()

    def build_and_check(rule: str, seed: int) -> "TrainingRun":
        run = build_run(rule, seed)
        if rule not in checked_rules and (warning := check_rate(run)):
            notes.append(warning)
            show(f"warning: {warning}", file=sys.stderr)
        checked_rules.add(rule)
        return run

    return build_and_check


def conclude(
    comparison: "ComparedRules", config: DictConfig, notes: list[str], seconds: float
) -> bool:
    """Print and write the results of all runs; return whether they could be written."""
    from toolkit.figures import save, schedules
    from toolkit.figures.curves_figure import over_epochs
    from toolkit.results import delay_means, describe, write_result
    from toolkit.results.tracker import where_tracked
    from toolkit.results.wandb_run import track_differences
    from toolkit.training import pick_device

    folder = output_folder()
    runs, measure = comparison.runs, comparison.measure
    rows = [comparison.row(rule) for rule in comparison.schedules]
    delay_rows = [row for run in runs for row in run.named(run.delays)]
    delays = delay_means(delay_rows, ["rule", "stage"])
    table_rows = print_tables(comparison, config, rows, delays)

    run_notes = comparison.notes()
    result_fields: dict[str, Any] = {
        "judged_by": measure.name,
        "notes": [*dict.fromkeys([*notes, *run_notes])],
        "delays": delays,
    }
    if comparison.tuning:
        result_fields["tuning"] = comparison.tuning
    curves = {
        row["rule"]: comparison.curves_of(rule)
        for rule, row in zip(comparison.schedules, table_rows, strict=True)
        if comparison.runs_of(rule)
    }
    device = describe(pick_device(config.device))
    unwritten: list[str] = []
    # The tables are printed in any case: hours of training must not end with nothing.
    with note_write_errors(unwritten, folder):
        write_result(
            folder, "comparison", rows, config, device, seconds, **result_fields
        )
        save(over_epochs(curves, measure), folder / measure.name)
        save(schedules(comparison.unlike_schedules()), folder / "schedules")
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


def print_tables(
    comparison: "ComparedRules",
    config: DictConfig,
    rows: Sequence[dict[str, Any]],
    delays: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Print the tables of learning rates, rules and delays; return that of rules."""
    measure, labels = comparison.measure, comparison.labels
    has_rates = len({row["lr"] for row in rows}) > 1 or bool(comparison.tuning)
    table_rows = []
    for row in rows:
        label = labels[row["rule"]]
        if row["diverged"]:
            label += f" ({row['diverged']} of {config.seeds} diverged)"
        cells = {"rule": label}
        if has_rates:
            cells |= rate_cells(row)
        cells |= metric_cells(row, measure, labels[comparison.baseline])
        table_rows.append(cells | staleness_cells(row) | peak_cells(row))

    if comparison.tuning:
        show(f"\n{table(comparison.tuning)}\n")
    show(f"\n{table(table_rows)}\n")
    if delays:
        show(f"{delay_table(delays, labels)}\n")
    legend = _LEGEND.format(seeds=config.seeds, by=measure)
    if config.margin is not None:
        legend += _VERDICTS
    show(legend)
    return table_rows


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


if __name__ == "__main__":
    main()

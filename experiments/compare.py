"""The same training under several rules: accuracy, memory and traffic, side by side.

    python experiments/compare.py experiment=digits
    python experiments/compare.py experiment=paper/cifar10_resnet18 data.root=/path workers=8

More rules: +schedule@rules.cdp_late=cdp_v1 rules.cdp_late.delay=2; fewer: ~rules.cdp_v1. All rules
are compared with the first that is left.

A rule may have its own optimizer, lr, clip, ema and readout: +own.cdp_v1.optimizer.lr=0.05,
+optimizer@own.cdp_v1.optimizer=nadam. tune.rates=[0.5,1,2] tries each rule at these factors on its
optimizer.lr, for tune.epochs epochs with tune.seed, and trains it at the best, by the test metric
after the last epoch.

parallel=8 trains up to 8 runs at the same time on the one device, each in a process of its own.
Only seconds differ from those of parallel=1:

    python experiments/compare.py experiment=cifar10_short data.root=/path device=cuda parallel=8

An interrupted comparison continues with the unfinished run and then the others. Seeds and rules can
be added; all other options stay as before:

    python experiments/compare.py resume=outputs/compare/... seeds=8
"""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli import STOPPED, Ended, build, entry_point, is_rank_zero, output_folder
from toolkit.cli.check_options import check_counts, check_own
from toolkit.errors import UserError
from toolkit.files import note_write_errors
from toolkit.format import (
    count,
    metric_cells,
    peak_cells,
    rate_cells,
    staleness_cells,
    table,
)
from toolkit.metric import ACCURACY, LOSS, Metric
from toolkit.options import TUNING, TrackingOptions, TuneOptions
from toolkit.schedule import Schedule, labels

if TYPE_CHECKING:
    from toolkit.results.comparison import RuleRun
    from toolkit.runtime import World
    from toolkit.training import TrainingRun
    from toolkit.training.data import SampleSet


@dataclass
class Trained:
    """The runs of a comparison."""

    runs: list["RuleRun"]
    notes: list[str] = field(default_factory=list)
    unwritten: str = ""  # why what has ended is not on the disk


@entry_point("compare")
def main(config: DictConfig) -> Ended:
    from toolkit.results.provenance import resume_command
    from toolkit.results.statistics import check_margin
    from toolkit.results.tuning import trials, tried, with_best
    from toolkit.training import StoppedError

    check_counts(config, "seeds")
    check_margin(config.margin)
    check_own(config)
    build.check_parallel(config)
    if not config.rules:
        raise UserError("there are no rules to compare: leave one, or add +schedule@rules.NAME=...")
    start, folder = time.perf_counter(), output_folder()
    load = cache(partial(build.load_samples, config.data))
    build.settle_delays(config, lambda: load().form)
    rules = {name: build.build_schedule(rule) for name, rule in config.rules.items()}
    world = build.join_world(config, next(iter(rules.values())))
    options = build.plain(config)
    TrackingOptions(**options["tracking"])  # refuses a wrong one before the first run
    samples = load()
    by, tuning = samples.form.metric, list[dict[str, Any]]()
    warnings = different_batches(rules, config.batch)
    for note in warnings if is_rank_zero() else ():
        print(f"note: {note}")
    try:
        if TuneOptions(**options["tune"]).rates:
            found = train(OmegaConf.create(trials(options)), folder / TUNING, samples, world)
            tuning = tried(options, found.runs, by)
            warnings += [found.unwritten] if found.unwritten else []
            config = OmegaConf.create({**config, "own": with_best(options, tuning)})
        trained = train(config, folder, samples, world)
    except StoppedError as stopped:
        if is_rank_zero():
            lost = "" if stopped.saved else "the run under way is not saved; "
            print(f"stopped by {stopped}; {lost}{resume_command(folder)}", file=sys.stderr)
        return Ended(STOPPED)
    if not is_rank_zero():
        return Ended()
    notes = [*trained.notes, *warnings, *([trained.unwritten] if trained.unwritten else [])]
    seconds = time.perf_counter() - start
    whole = conclude(config, rules, trained.runs, by, tuning, notes, seconds)
    return Ended(0 if whole and not trained.unwritten else 1)


def train(config: DictConfig, folder: Path, samples: "SampleSet", world: "World | None") -> Trained:
    """Train the runs of a comparison that have not ended in ``folder``; return all of its runs."""
    from toolkit.plan.rate_check import check_rate
    from toolkit.results.comparison import (
        before,
        select_runs,
        train_all,
        try_keep_runs,
        unfinished,
    )
    from toolkit.training import TrainingRun

    checks = config.stability and not config.resume and folder.name != TUNING
    unchecked = {*config.rules} if checks and is_rank_zero() else set()

    options = build.plain(config)
    make_run = build.RuleBuilder(options, samples)

    def of_rule(rule: str, seed: int) -> TrainingRun:
        run = make_run(rule, seed)
        if rule in unchecked and (unstable := check_rate(run)):
            found.notes.append(unstable)
            print(f"warning: {unstable}", file=sys.stderr)
        unchecked.discard(rule)
        return run

    runs, begun = before(options, folder, world)
    found, n_ended = Trained(runs), len(select_runs(options, runs))
    if n_ended:
        ended = count(n_ended, "trial" if folder.name == TUNING else "run")
        found.notes.append(f"resumed: {ended} had ended before, and take no seconds")
    if n_more := len(runs) - n_ended:
        found.notes.append(f"runs.csv has {n_more} more, of other rules or seeds")
    for note in found.notes if is_rank_zero() else ():
        print(f"note: {note}")
    keys = unfinished(options, runs, begun)
    n_processes = min(config.parallel, len(keys))
    if n_processes > 1:
        trained = train_in_processes(options, of_rule, folder, keys, n_processes)
        found.notes.append(
            f"up to {n_processes} runs trained at the same time and shared the device, so the"
            " samples/s of each are lower than alone"
        )
    else:
        trained = train_all(options, of_rule, folder, runs, begun, world)
    n_before = len(runs)
    for run in trained:
        # Runs that train at the same time end in any order.
        after = sorted([*runs[n_before:], run], key=lambda run: keys.index((run.rule, run.seed)))
        runs[n_before:] = after
        if not is_rank_zero():
            continue
        warned, found.unwritten = found.unwritten, try_keep_runs(folder, runs)
        if found.unwritten not in ("", warned):
            print(f"warning: {found.unwritten}; training continues", file=sys.stderr)
    found.runs = select_runs(options, runs)
    return found


def train_in_processes(
    options: dict[str, Any],
    build_run: Callable[[str, int], "TrainingRun"],
    folder: Path,
    keys: list[tuple[str, int]],
    n_processes: int,
) -> Iterator["RuleRun"]:
    """Train the runs ``keys`` at the same time, ``n_processes`` of them at most.

    Args:
        options: those of the comparison.
        build_run: function that builds and checks a run in this process.
        folder: folder of the comparison.
        keys: rule and seed of each run.
        n_processes: number of processes.

    Raises:
        UserError: a run cannot be trained with its options, or the device's memory is too small
            for so many.
    """
    from toolkit.results.comparison import check_runs
    from toolkit.results.parallel_runs import train_in_parallel
    from toolkit.training.run_memory import MemoryCheck

    memory = MemoryCheck(n_processes)
    check_runs(options, build_run, keys, memory.add)
    for note in [*memory.notes(), *crowded(n_processes, options["device"])]:
        print(f"note: {note}")
    yield from train_in_parallel(options, build.RuleBuilder(options), folder, keys, n_processes)


def crowded(n_processes: int, device: str) -> list[str]:
    """Return a note if processes on the CPU have more threads than there are cores."""
    import torch

    from toolkit.training import pick_device

    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if pick_device(device).type != "cpu" or n_processes * threads <= cores:
        return []
    return [
        f"{n_processes} runs with {count(threads, 'thread')} each share {count(cores, 'core')}:"
        f" threads={max(1, cores // n_processes)} or a smaller parallel may be faster"
    ]


def conclude(
    config: DictConfig,
    rules: dict[str, Schedule],
    runs: list["RuleRun"],
    by: Metric,
    tuning: list[dict[str, Any]],
    notes: list[str],
    seconds: float,
) -> bool:
    """Print and write what came of all runs; returns whether it could be written."""
    from toolkit.figures import save, schedules
    from toolkit.figures.curves_figure import over_epochs
    from toolkit.results import delay_means, describe, write_result
    from toolkit.results.tuning import edge_notes
    from toolkit.training import pick_device

    folder = output_folder()
    called = labels({name: schedule.name for name, schedule in rules.items()})
    first, *_ = rules
    margin = {by: config.margin}
    rows = []
    for name, schedule in rules.items():
        rate = {"lr": build.rule_config(config, name, config.seed).optimizer.lr}
        rows.append(summary(schedule, runs, name, first, margin) | rate)
    rates = {row["lr"] for row in rows}
    cells, curves = [], dict[str, list[list[float]]]()
    for row in rows:
        lost = f" ({row['diverged']} of {config.seeds} diverged)" if row["diverged"] else ""
        label = called[row["rule"]] + lost
        if of_rule := [run for run in runs if run.rule == row["rule"]]:
            curves[label] = [[by.factor * e[by.key] for e in run.epochs] for run in of_rule]
        judged = metric_cells(row, by, called[first])
        rate = rate_cells(row) if len(rates) > 1 or tuning else {}
        cells.append({"rule": label} | rate | judged | staleness_cells(row) | peak_cells(row))
    delays = delay_means([row for run in runs for row in run.named(run.delays)], ["rule", "stage"])
    of_runs = [*diverged(runs, called), *edge_notes(tuning)]
    of_runs += [note for run in runs for note in run.notes]
    if tuning:
        print(f"\n{table(tuning)}\n")
    print(f"\n{table(cells)}\n")
    if delays:
        print(f"{table(delays)}\n")
    print(_LEGEND.format(seeds=config.seeds, by=by) + _VERDICTS * (config.margin is not None))
    unwritten: list[str] = []
    notes = [*dict.fromkeys([*notes, *of_runs])]
    where = describe(pick_device(config.device))
    more: dict[str, Any] = {"judged_by": by.name, "notes": notes, "delays": delays}
    more |= {"tuning": tuning} if tuning else {}
    with note_write_errors(unwritten, folder):
        write_result(folder, "comparison", rows, config, where, seconds, **more)
        save(over_epochs(curves, by), folder / by.name)
        save(schedules(different(rules)), folder / "schedules")
    for note in dict.fromkeys([*of_runs, *unwritten]):
        print(f"note: {note}")
    if not unwritten:
        print(f"written to {folder}: {by.name}.png, schedules.png, result.json, ...")
    if places := [run.where for run in runs if run.where]:
        offline = f"tracked offline: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"
        online = f"{places[0]} and {len(places) - 1} more of its group"
        print(online if places[0].startswith("tracked online") else offline)
    return not unwritten


_LEGEND = """\
{by.name}: of the last epoch, mean and standard deviation over {seeds} seeds
difference: paired by seed, in {by.unit_of_differences}, with a 95 % interval
staleness: steps by which weights are late, over stages and micro-batches
peak activations: all workers together, in micro-batches; 1 is all activations of one
traffic: all workers together, in stages' parameters
"""
_VERDICTS = """\
at a margin: what two one-sided paired t-tests at 5 % show of the difference; p: the larger of both
"""


def different(rules: dict[str, Schedule]) -> list[Schedule]:
    """The schedules of rules, each once; those that share a name are labelled by their rules."""
    once = dict[str, Schedule]()
    for name, schedule in rules.items():
        if schedule not in once.values():
            once[name] = schedule
    called = labels({name: schedule.name for name, schedule in once.items()})
    return [replace(schedule, name=called[name]) for name, schedule in once.items()]


def different_batches(rules: dict[str, Schedule], batch: int) -> list[str]:
    """A warning if a training step of some rules takes more samples than that of others."""
    called = labels({name: schedule.name for name, schedule in rules.items()})
    taken = {label: batch * rules[name].n_microbatches for name, label in called.items()}
    if len(set(taken.values())) == 1:
        return []
    sizes = ", ".join(f"{label} {n}" for label, n in taken.items())
    return [f"training steps differ in their samples ({sizes}), so not by their rules alone"]


def summary(
    schedule: Any, runs: list["RuleRun"], name: str, first: str, margin: Mapping[Metric, float]
) -> dict[str, Any]:
    """One row: metrics of the last epochs, their differences, costs."""
    from toolkit.results import over_seeds
    from toolkit.schedule import steady_state

    def last(rule: str, by: Metric) -> dict[int, float]:
        return {run.seed: by.factor * run.epochs[-1][by.key] for run in runs if run.rule == rule}

    steady = steady_state(schedule)
    return {
        "rule": name,
        "schedule": schedule.name,
        "diverged": sum(run.rule == name and run.diverged_in is not None for run in runs),
        **over_seeds(last(name, ACCURACY), last(first, ACCURACY), ACCURACY, margin.get(ACCURACY)),
        **over_seeds(last(name, LOSS), last(first, LOSS), LOSS, margin.get(LOSS)),
        "staleness_mean": schedule.mean_staleness,
        "staleness_max": schedule.max_staleness,
        "peak_activations": steady.peak_activations / schedule.n_stages,
        "traffic_mean": float(mean(steady.units_by_slot)),
        "traffic_max": float(max(steady.units_by_slot)),
    }


def diverged(runs: list["RuleRun"], called: dict[str, str]) -> list[str]:
    """A note on each rule by which a loss has diverged."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.diverged_in is not None:
            found.setdefault(run.rule, []).append(f"seed {run.seed} in epoch {run.diverged_in}")
    return [
        f"{called[rule]}: the loss diverged ({', '.join(seeds)}), which counts in no mean; lower"
        " optimizer.lr, or warm up with lr.warmup_epochs"
        for rule, seeds in found.items()
    ]


if __name__ == "__main__":
    main()

"""The same training under several rules: accuracy, memory and traffic, side by side.

    python experiments/compare.py experiment=digits
    python experiments/compare.py experiment=paper/cifar10_resnet18 data.root=/path workers=8

More rules: +schedule@rules.cdp_late=cdp_v1 rules.cdp_late.delay=2; fewer: ~rules.cdp_v1. The first
one left is what the others are compared with.

One that was broken off goes on with the run that was under way, and then with the others, with more
seeds or rules if asked, and otherwise with the options of before:

    python experiments/compare.py resume=outputs/compare/... seeds=8
"""

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from toolkit.config import STOPPED, Ended, entry_point, leads
from toolkit.config.counts import check_counts
from toolkit.measure import ACCURACY, LOSS, Measure
from toolkit.schedule import Schedule, labels

if TYPE_CHECKING:
    from toolkit.tracking import Progress
    from toolkit.tracking.compared import RuleRun
    from toolkit.training import Step
    from toolkit.training.data import SampleSet
    from toolkit.training.keeper import Signals


@entry_point("compare", Path(__file__).parents[1] / "conf")
def main(config: DictConfig) -> Ended:
    from toolkit.config import build_schedule
    from toolkit.tracking.compared import asked_for, ended_before, keep_options, keep_runs
    from toolkit.training import StoppedError
    from toolkit.training.data import load

    check_counts(config, "seeds")
    if not config.rules:
        raise ValueError(
            "there are no rules to compare: leave one, or add +schedule@rules.NAME=..."
        )
    start = time.perf_counter()
    rules = {name: build_schedule(rule) for name, rule in config.rules.items()}
    folder = Path(HydraConfig.get().runtime.output_dir)
    kept = ended_before(Path(config.resume), config) if config.resume else []
    notes = resumed(len(asked_for(config, kept)), len(kept))
    notes += different_batches(rules, config.batch)
    if leads():
        for note in notes:
            print(f"note: {note}")
        keep_options(folder, config, kept)
    samples = load(config.data)
    try:
        for run in train_all(config, samples, folder, {(run.rule, run.seed) for run in kept}):
            kept.append(run)
            if leads():  # what has ended is kept, whatever befalls the others
                keep_runs(folder, kept)
    except StoppedError as stopped:
        if leads():
            print(f"stopped by {stopped}; {go_on(folder, stopped.saved)}", file=sys.stderr)
        return Ended(STOPPED)
    if leads():
        seconds = time.perf_counter() - start
        conclude(config, rules, asked_for(config, kept), samples.form.measure, notes, seconds)
    return Ended()


def conclude(
    config: DictConfig,
    rules: dict[str, Schedule],
    runs: list["RuleRun"],
    by: Measure,
    notes: list[str],
    seconds: float,
) -> None:
    """Write and print what came of all runs."""
    from toolkit import tables
    from toolkit.figures import save, schedules
    from toolkit.figures.accuracy import over_epochs
    from toolkit.tracking import delay_means, describe, write_result
    from toolkit.training import pick_device

    folder = Path(HydraConfig.get().runtime.output_dir)
    called = labels({name: schedule.name for name, schedule in rules.items()})
    first = next(iter(called.values()))
    lost = diverged(runs, called)
    rows = [summary(schedule, runs, name, next(iter(rules))) for name, schedule in rules.items()]
    counted = {
        row["rule"]: called[row["rule"]]
        + (f" ({row['diverged']} of {config.seeds} diverged)" if row["diverged"] else "")
        for row in rows
    }
    delays = delay_means([row for run in runs for row in run.named(run.delays)], ["rule", "stage"])
    write_result(
        folder,
        "comparison",
        rows,
        config,
        describe(pick_device(config.device)),
        seconds,
        judged_by=by.name,
        notes=list(dict.fromkeys([*notes, *lost, *(n for run in runs for n in run.notes)])),
        delays=delays,
    )
    curves = {
        label: [[by.factor * epoch[by.metric] for epoch in run.epochs] for run in runs_of]
        for name, label in counted.items()
        if (runs_of := [run for run in runs if run.rule == name])
    }
    told_apart = [replace(schedule, name=called[name]) for name, schedule in rules.items()]
    figures = [
        *save(over_epochs(curves, by), folder / by.name),
        *save(schedules(told_apart), folder / "schedules"),
    ]
    shown = [
        {"rule": counted[row["rule"]]}
        | tables.compared(row, by, first)
        | tables.staleness(row)
        | tables.peaks(row)
        for row in rows
    ]
    print(f"\n{tables.table(shown)}\n")
    if delays:
        print(f"{tables.table(delays)}\n")
    for note in lost:
        print(f"note: {note}")
    print(_LEGEND.format(seeds=config.seeds, by=by))
    print(f"written to {folder}: {', '.join(path.name for path in figures)}, result.json, ...")
    if line := where_tracked([run.where for run in runs if run.where], folder):
        print(line)


_LEGEND = """\
{by.name}: of the last epoch, mean and standard deviation over {seeds} seeds
difference: paired by seed, in {by.unit_of_differences}, with a 95 % interval
staleness: steps by which weights are late, over stages and micro-batches
peak activations: all workers together, in micro-batches; 1 is all activations of one
traffic: all workers together, in stages' parameters
"""


def resumed(n_ended: int, n_kept: int) -> list[str]:
    """Notes on runs that had ended before: ``n_ended`` that count, of ``n_kept`` in the folder."""
    notes = [f"resumed: {n_ended} runs had ended before, and take no seconds"] if n_ended else []
    if n_kept > n_ended:
        notes.append(f"runs.csv has {n_kept - n_ended} more, of other rules or seeds")
    return notes


def train_all(
    config: DictConfig, samples: "SampleSet", folder: Path, done: set[tuple[str, int]]
) -> Iterator["RuleRun"]:
    """Each rule with each seed, but for those that are done.

    Raises:
        StoppedError: a signal has ended the run under way, and with it the comparison.
    """
    from toolkit.tracking import Progress
    from toolkit.training.keeper import Signals

    seeds = range(config.seed, config.seed + config.seeds)
    wanted = [(name, seed) for seed in seeds for name in config.rules if (name, seed) not in done]
    with (
        Progress(config.epochs * len(wanted), shown=leads()) as progress,
        Signals().heard() as heard,
    ):
        for name, seed in wanted:
            own = {"schedule": config.rules[name], "seed": seed}
            single = OmegaConf.create({**config, **own, **_UNGUARDED})
            yield train(single, name, samples, folder, progress, heard)


_UNGUARDED: dict[Any, Any] = {"guard": "stop", "guard_factor": inf}
"""A loss that is high, but a number, is a result like any other."""


def train(
    config: DictConfig,
    name: str,
    samples: "SampleSet",
    folder: Path,
    progress: "Progress",
    signals: "Signals",
) -> "RuleRun":
    """One run of the comparison in ``folder``, from where it was saved if it was under way.

    Args:
        config: of the run.
        name: of its rule.

    Raises:
        StoppedError: one of ``signals`` has ended it.
    """
    from toolkit.tracking import Curves, Ledger, describe, keys, track, track_schedule
    from toolkit.tracking.compared import RuleRun, under_way
    from toolkit.tracking.runs import group_of
    from toolkit.training import DivergedError, StoppedError, prepare, run_kept

    job = prepare(config, samples)
    progress.run(f"{job.schedule.name}, seed {config.seed}")
    own = under_way(folder, name, config.seed)
    if leads():
        own.mkdir(parents=True, exist_ok=True)
    delays = Ledger(own / "delays.csv", ["step", "stage"], resume=True, here=leads())
    by = samples.form.measure
    notes: list[str] = []
    with track(
        config,
        folder,
        device=describe(job.device),
        name=f"{name}, seed {config.seed}",
        job_type="compare",
        group=group_of(folder),
        resume=True,
        alone=False,
        own=own,
        here=leads(),
    ) as tracker:
        curves = Curves(tracker, config.tracking.every)
        track_schedule(tracker, job.schedule)

        def count(step: "Step") -> None:
            progress.trained(step)
            curves.trained(step)
            delays.put([asdict(delay) for delay in step.result.delays])

        try:
            outcome = run_kept(
                job,
                own,
                resume=None,
                weights=False,
                on_epoch=curves.epoch,
                on_step=count,
                signals=signals,
            )
        except StoppedError as stopped:
            tracker.end(f"stopped by {stopped}", STOPPED)
            raise
        except DivergedError as lost:
            n_ended = len(lost.epochs)
            epochs, told = lost.all_epochs(config.epochs), "diverged"
            tracker.end(f"failed: its loss diverged in epoch {n_ended}", 1)
            progress.skip(config.epochs - n_ended - 1)
        else:
            epochs, told = outcome.epochs, outcome.epochs[-1].told(by)
            curves.whole(epochs)
            final = asdict(epochs[-1]).items()
            tracker.summary({keys.final(k): v for k, v in final if v is not None})
            notes += outcome.notes
            if outcome.resumed_at:
                notes.append(f"resumed at step {outcome.resumed_at}")
        progress.note(f"last: {job.schedule.name} {told}")
    notes = [f"{name}, seed {config.seed}: {note}" for note in notes] + tracker.notes
    rows = [asdict(epoch) for epoch in epochs]
    return RuleRun(name, config.seed, rows, delays.rows(), notes, tracker.where)


def go_on(folder: Path, saved: bool) -> str:
    """How the comparison in ``folder`` is gone on with."""
    from toolkit.tracking.provenance import starter

    command = shlex.join([*starter(), "experiments/compare.py", f"resume={folder}"])
    return command if saved else f"the run under way is not saved; {command}"


def different_batches(rules: dict[str, Schedule], batch: int) -> list[str]:
    """A warning if a training step of some rules takes more samples than that of others."""
    called = labels({name: schedule.name for name, schedule in rules.items()})
    taken = {label: batch * rules[name].n_microbatches for name, label in called.items()}
    if len(set(taken.values())) == 1:
        return []
    told = ", ".join(f"{label} {n}" for label, n in taken.items())
    return [f"training steps differ in their samples ({told}), so not by their rules alone"]


def where_tracked(places: list[str], folder: Path) -> str:
    """One line for all runs."""
    if not places:
        return ""
    if places[0].startswith("tracked online"):
        return f"{places[0]} and {len(places) - 1} more of its group"
    return f"tracked offline: wandb sync {shlex.quote(str(folder / 'wandb'))}/offline-run-*"


def summary(schedule: Any, runs: list["RuleRun"], name: str, first: str) -> dict[str, Any]:
    """One row of the comparison; accuracies in per cent, differences of them in points."""
    from toolkit.schedule import steady_state

    steady = steady_state(schedule)
    return {
        "rule": name,
        "schedule": schedule.name,
        "diverged": sum(run.rule == name and run.diverged_in is not None for run in runs),
        **compared(runs, name, first, ACCURACY),
        **compared(runs, name, first, LOSS),
        "staleness_mean": schedule.mean_staleness,
        "staleness_max": schedule.max_staleness,
        "peak_activations": steady.peak_activations / schedule.n_stages,
        "traffic_mean": float(mean(steady.units_by_slot)),
        "traffic_max": float(max(steady.units_by_slot)),
    }


def compared(runs: list["RuleRun"], name: str, first: str, by: Measure) -> dict[str, float]:
    """What the last epochs came to, and by how much that differs from ``first``.

    Runs that have diverged are left out.
    """
    from toolkit.tracking import over_seeds

    final, base = (
        {run.seed: by.factor * run.epochs[-1][by.metric] for run in runs if run.rule == rule}
        for rule in (name, first)
    )
    return over_seeds(final, base, by)


def diverged(runs: list["RuleRun"], called: dict[str, str]) -> list[str]:
    """A note on each rule by which a loss has diverged."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.diverged_in is not None:
            found.setdefault(run.rule, []).append(f"seed {run.seed} in epoch {run.diverged_in}")
    return [
        f"{called[rule]}: the loss diverged ({', '.join(told)}), which counts in no mean; lower"
        " optimizer.lr, or warm up with lr.warmup_epochs"
        for rule, told in found.items()
    ]


if __name__ == "__main__":
    main()

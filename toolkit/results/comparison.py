"""The runs of a comparison: each rule with each seed, one after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from toolkit.options import STOPPED, TrackingOptions
from toolkit.results import Curves, Ledger, Progress, describe, track, track_schedule, training_log
from toolkit.results.comparison_folder import (
    Key,
    Options,
    RuleRun,
    begun,
    ended_before,
    keep_options,
    keep_runs,
    prepare_folder,
    seeds_of,
)
from toolkit.runtime import World
from toolkit.torchrun import is_rank_zero, restarted
from toolkit.training import DivergedError, Step, StoppedError, TrainingRun, run_with_checkpoints
from toolkit.training.run_with_checkpoints import Signals, rollback_schedule

Build = Callable[[str, int], TrainingRun]
"""Builds the run of a rule with a seed."""


def before(options: Options, folder: Path, world: World | None) -> tuple[list[RuleRun], list[Key]]:
    """Read the finished runs in ``folder``, and which others were saved; write the options to it.

    Every rank calls it, and gets what the first rank finds.

    Args:
        options: options of the comparison.
        folder: folder of the comparison.
        world: the ranks, if there are several.

    Raises:
        UserError: runs in ``folder`` were trained with other options.
    """
    found = None
    if is_rank_zero():
        runs = ended_before(folder, options) if options["resume"] or restarted() else []
        keep_options(folder, options, runs)
        if runs:  # removes the rows of runs that were interrupted
            keep_runs(folder, runs)
        found = runs, begun(folder)
    if world is not None:
        found = world.gather(found)[0]
    assert found is not None
    return found


def train_all(
    options: Options,
    build: Build,
    folder: Path,
    ended: Sequence[RuleRun],
    under_way: Sequence[Key],
    world: World | None = None,
) -> Iterator[RuleRun]:
    """Train the runs that have not ended, those under way first.

    Args:
        options: options of the comparison.
        build: function that builds the run of a rule with a seed.
        folder: folder of the comparison.
        ended: runs that have ended.
        under_way: rules and seeds of the runs that were saved under way.
        world: the ranks, if there are several.

    Raises:
        UserError: one of them cannot be trained with its options; none has begun then.
        StoppedError: a signal has ended the run under way, and with it the comparison.
    """
    tracking = TrackingOptions(**options["tracking"])
    done = {(run.rule, run.seed) for run in ended}
    keys = [(name, seed) for seed in seeds_of(options) for name in options["rules"]]
    wanted = [key for key in keys if key not in done]
    wanted.sort(key=lambda key: key not in under_way)
    for name in dict.fromkeys(name for name, _ in wanted):  # before the first has trained for hours
        rollback_schedule(build(name, options["seed"]))
    n_epochs = options["epochs"] * len(wanted)
    with Progress(n_epochs, shown=is_rank_zero()) as progress, Signals().heard() as signals:
        for name, seed in wanted:
            # Ranks continue until all know of a signal.
            if number := signals.agreed if world else signals.number:
                raise StoppedError(number, saved=True)
            yield _trained(build, name, seed, folder, tracking, progress, signals)


def _trained(
    build: Build,
    name: str,
    seed: int,
    folder: Path,
    tracking: TrackingOptions,
    progress: Progress,
    signals: Signals,
) -> RuleRun:
    """One run of the comparison in ``folder``, from where it was saved if it was under way.

    Raises:
        StoppedError: one of ``signals`` has ended it.
    """
    called = f"{name}, seed {seed}"
    job = build(name, seed)
    n_epochs = job.options.epochs
    progress.run(f"{job.schedule.name}, seed {seed}")
    own = prepare_folder(folder, name, seed, here=is_rank_zero())
    delays = Ledger(own / "delays.csv", ["step", "stage"], resume=True, here=is_rank_zero())
    by = job.samples.form.metric
    notes: list[str] = []
    with track(
        job.record,
        folder,
        device=describe(job.device),
        name=called,
        job_type="compare",
        group=training_log.group_of(folder),
        resume=True,
        own=own,
        here=is_rank_zero(),
    ) as tracker:
        curves = Curves(tracker, tracking.every)
        track_schedule(tracker, job.schedule)

        def count(step: Step) -> None:
            progress.trained(step)
            curves.trained(step)
            delays.put([asdict(delay) for delay in step.result.delays])

        try:
            outcome = run_with_checkpoints(
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
            epochs, score = lost.all_epochs(n_epochs), "diverged"
            tracker.end(f"failed: its loss diverged in epoch {len(lost.epochs)}", 1)
        else:
            epochs, score = outcome.epochs, outcome.epochs[-1].text(by)
            final = asdict(epochs[-1]).items()
            tracker.summary({training_log.final(k): v for k, v in final if v is not None})
            notes += outcome.notes
            if outcome.resumed_at:
                notes.append(f"resumed at step {outcome.resumed_at}")
        progress.ended(n_epochs)
        progress.note(f"last: {job.schedule.name} {score}")
    notes = [f"{called}: {note}" for note in notes] + tracker.notes
    rows = [asdict(epoch) for epoch in epochs]
    return RuleRun(name, seed, rows, delays.rows(), notes, tracker.where)

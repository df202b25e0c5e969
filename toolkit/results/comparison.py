"""The runs of a comparison: each rule with each seed, one after another."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli.command import STOPPED
from toolkit.cli.process import is_rank_zero, restarted
from toolkit.results import Curves, Ledger, Progress, describe, track, track_schedule, training_log
from toolkit.results.comparison_folder import (
    Key,
    RuleRun,
    begun,
    ended_before,
    keep_options,
    keep_runs,
    prepare_folder,
    run_options,
    seeds_of,
)
from toolkit.results.wandb_run import check_tracking
from toolkit.schedule import Schedule
from toolkit.training import DivergedError, Step, StoppedError, prepare, run_with_checkpoints
from toolkit.training.checkpoint_callback import Signals
from toolkit.training.data import SampleSet
from toolkit.training.run_with_checkpoints import check_run
from toolkit.training.training_run import join_ranks

# A loss that is high, but a number, is a result like any other.
_UNGUARDED: dict[Any, Any] = {"guard": "stop", "guard_factor": inf}


def before(config: DictConfig, schedule: Schedule, folder: Path) -> tuple[list[RuleRun], list[Key]]:
    """The runs that have ended, and which others were saved under way, as the first rank finds.

    Every rank calls it. From then on ``folder`` tells the options.

    Args:
        config: of the comparison.
        schedule: of a rule.
        folder: of the comparison; that of the first rank counts.

    Raises:
        ValueError: options that cannot be, or with which runs in ``folder`` were not trained.
    """
    check_tracking(config.tracking)
    _, world = join_ranks(config, schedule)
    found = None
    if is_rank_zero():
        runs = ended_before(folder, config) if config.resume or restarted() else []
        keep_options(folder, config, runs)
        if runs:  # of what was broken off in between nothing stays
            keep_runs(folder, runs)
        found = runs, begun(folder)
    if world is not None:
        found = world.gather(found)[0]
    assert found is not None
    return found


def train_all(
    config: DictConfig,
    samples: SampleSet,
    folder: Path,
    ended: Sequence[RuleRun],
    under_way: Sequence[Key],
) -> Iterator[RuleRun]:
    """Those runs that are asked for and have not ended; first what is under way.

    Raises:
        ValueError: one of them cannot be trained with its options; none has begun then.
        StoppedError: a signal has ended the run under way, and with it the comparison.
    """
    done = {(run.rule, run.seed) for run in ended}
    seeds = seeds_of(config)
    wanted = [key for seed in seeds for name in config.rules if (key := (name, seed)) not in done]
    wanted.sort(key=lambda key: key not in under_way)
    for name in dict.fromkeys(name for name, _ in wanted):  # before the first has trained for hours
        check_run(_options_of(config, name, config.seed), samples)
    alone = "timeout" not in config.runtime
    n_epochs = config.epochs * len(wanted)
    with Progress(n_epochs, shown=is_rank_zero()) as progress, Signals().heard() as signals:
        for name, seed in wanted:
            # Ranks go on until all know of a signal.
            if number := signals.number if alone else signals.agreed:
                raise StoppedError(number, saved=True)
            own = _options_of(config, name, seed)
            yield _trained(own, name, samples, folder, progress, signals)


def _options_of(config: DictConfig, rule: str, seed: int) -> DictConfig:
    return OmegaConf.create(run_options(config, rule, seed) | _UNGUARDED)


def _trained(
    config: DictConfig,
    name: str,
    samples: SampleSet,
    folder: Path,
    progress: Progress,
    signals: Signals,
) -> RuleRun:
    """One run of the comparison in ``folder``, from where it was saved if it was under way.

    Args:
        config: of the run.
        name: of its rule.

    Raises:
        StoppedError: one of ``signals`` has ended it.
    """
    called = f"{name}, seed {config.seed}"
    job = prepare(config, samples)
    progress.run(f"{job.schedule.name}, seed {config.seed}")
    own = prepare_folder(folder, name, config.seed, here=is_rank_zero())
    delays = Ledger(own / "delays.csv", ["step", "stage"], resume=True, here=is_rank_zero())
    by = samples.form.metric
    notes: list[str] = []
    with track(
        config,
        folder,
        device=describe(job.device),
        name=called,
        job_type="compare",
        group=training_log.group_of(folder),
        resume=True,
        own=own,
        here=is_rank_zero(),
    ) as tracker:
        curves = Curves(tracker, config.tracking.every)
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
            epochs, told = lost.all_epochs(config.epochs), "diverged"
            tracker.end(f"failed: its loss diverged in epoch {len(lost.epochs)}", 1)
        else:
            epochs, told = outcome.epochs, outcome.epochs[-1].told(by)
            final = asdict(epochs[-1]).items()
            tracker.summary({training_log.final(k): v for k, v in final if v is not None})
            notes += outcome.notes
            if outcome.resumed_at:
                notes.append(f"resumed at step {outcome.resumed_at}")
        progress.ended(config.epochs)
        progress.note(f"last: {job.schedule.name} {told}")
    notes = [f"{called}: {note}" for note in notes] + tracker.notes
    rows = [asdict(epoch) for epoch in epochs]
    return RuleRun(name, config.seed, rows, delays.rows(), notes, tracker.where)

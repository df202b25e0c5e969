"""A run that can be stopped, resumed and rolled back."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.errors import UserError, check_choice, first_line
from toolkit.options import INDIFFERENT, RESUMED_OTHERWISE
from toolkit.schedule import Schedule, timing
from toolkit.training.checkpoint import Checkpoints, check_keep, from_rank_0
from toolkit.training.checkpoint_callback import GUARDS, CheckpointCallback, SaveIntervals, Signals
from toolkit.training.config_diff import FREE, changed_options, rate_follows_epochs
from toolkit.training.data import SampleSet
from toolkit.training.loop import DivergedError, Epoch, Position, Step
from toolkit.training.training_run import TrainingRun, prepare

_ROLLBACKS = 3
_FIRST_STRETCH = 8  # steps; those that are measured are not cut up


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        epochs: their metrics.
        notes: sentences on what did not go as it should: checkpoints that were damaged or could
            not be written, rollbacks, and updates that were left out.
        job: the one that ended; another one than began if the run was rolled back.
        resumed_at: training steps that were done when it was resumed; 0 if it was not.
    """

    epochs: list[Epoch]
    notes: list[str]
    job: TrainingRun
    resumed_at: int = 0


def run_with_checkpoints(
    job: TrainingRun,
    folder: Path,
    *,
    resume: bool | None = False,
    weights: bool = True,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_note: Callable[[str], None] = lambda note: None,
    signals: Signals | None = None,
) -> Outcome:
    """Train ``job``, with checkpoints in ``folder`` as its configuration asks for.

    Args:
        job: fresh.
        folder: of the run; its checkpoints are in ``folder/checkpoints``. Rank 0's counts.
        resume: go on from the latest checkpoint that is whole; None: if there is one.
        weights: also keep the best checkpoint, and the weights that training ends with.
        on_epoch: called with each epoch's metrics.
        on_step: called after each step.
        on_note: called with each of the notes.
        signals: those that end it; SIGTERM and SIGINT of this process unless given.

    Raises:
        UserError: there is no checkpoint to resume from, or it is of another run; there are
            checkpoints, and none is to be resumed from; an option that the runtime cannot serve.
        StoppedError: a signal has ended the run.
        DivergedError: the loss has diverged, and there is no way back.
    """
    options = job.config
    safe = check_saving(job)
    often = _often(options)
    folder = from_rank_0(job.runtime, folder.resolve())
    checkpoints = Checkpoints(
        folder / "checkpoints", options.save.keep, sharded=options.save.sharded
    )
    delayed = job.schedule.max_staleness > 0
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        on_note(text)

    position, rolled_back = None, False
    if resume is False and checkpoints.any(job.runtime):
        raise UserError(
            f"{folder} has the checkpoints of a run: give another folder, or resume=True"
        )
    if resume or (resume is None and checkpoints.any(job.runtime)):
        job, position, rolled_back = _restored(job, checkpoints, note)
    resumed_at = position.steps_done if position else 0
    n_rollbacks, most = 0, _ROLLBACKS if delayed else 1  # or the same would come again
    with (signals or Signals()).heard() as signals:
        while True:
            saves = safe is not None or not often.never
            keeper = _callback(job, checkpoints, often, signals, saves, weights, rolled_back)
            if safe is not None and position is None:
                keeper.save(Position())
            try:
                epochs = job.run(on_epoch, on_step, position, keeper)
                keeper.write_model()
                notes += [*keeper.notes(), *job.left_out()]
                return Outcome(epochs, notes, job, resumed_at)
            except DivergedError as error:
                notes += keeper.notes()
                if safe is None or n_rollbacks == most:
                    told = _no_way_back(error, safe, n_rollbacks)
                    raise DivergedError(told, error.epochs) from error
                job, position = _rolled_back(job, checkpoints, safe, n_rollbacks, note)
                rolled_back = True
                n_rollbacks += 1
                note(
                    f"{error}: rolled back to epoch {position.epoch}, step {position.step}, and"
                    f" went on{' without delay' * delayed}"
                )


def check_run(config: DictConfig, samples: SampleSet) -> None:
    """Refuse options with which no run can begin, before anything is left of it.

    Raises:
        UserError: as :func:`toolkit.training.prepare` and :func:`check_saving` do.
    """
    check_saving(prepare(config, samples))


def check_saving(job: TrainingRun) -> Schedule | None:
    """Refuse options by which ``job`` cannot be saved or watched.

    Returns:
        the schedule by which it goes on where ``guard=rollback`` goes back; None for other guards.

    Raises:
        UserError: an interval that is not above 0, or a guard that cannot be.
    """
    options = job.config
    check_choice("guard", options.guard, GUARDS)
    if not options.guard_factor > 1:
        raise UserError(f"guard_factor is above 1; 10 is usual: got {options.guard_factor}")
    _often(options)
    check_keep(options.save.keep)
    return _safe(job) if options.guard == "rollback" else None


def _often(options: DictConfig) -> SaveIntervals:
    """When a run with these options is saved."""
    return SaveIntervals(options.save.steps, options.save.epochs, options.save.minutes)


def _callback(
    job: TrainingRun,
    checkpoints: Checkpoints,
    often: SaveIntervals,
    signals: Signals,
    saves: bool,
    weights: bool,
    rolled_back: bool,
) -> CheckpointCallback:
    options = job.config
    return CheckpointCallback(
        runtime=job.runtime,
        saves=saves,
        checkpoints=checkpoints,
        often=often,
        extra={
            "config": OmegaConf.to_yaml(options),
            "orders": _orders(options),
            "rolled_back": rolled_back,
        },
        guard=options.guard,
        guard_factor=options.guard_factor,
        signals=signals,
        measure=job.samples.form.metric,
        epochs=options.epochs,
        weights=weights,
        length=max(_FIRST_STRETCH, options.runtime.get("record", 0)),
    )


def _no_way_back(error: DivergedError, safe: Schedule | None, n_rollbacks: int) -> str:
    """What is said of a run that ends because its loss has diverged."""
    some = f"{n_rollbacks} rollback{'s' * (n_rollbacks > 1)}"
    tried = f", {some} notwithstanding" if n_rollbacks else ""
    back = "" if safe else " (guard=rollback goes back to the last checkpoint by itself)"
    return f"{error}{tried}: lower optimizer.lr, or warm up with lr.warmup_epochs{back}"


def _rolled_back(
    job: TrainingRun,
    checkpoints: Checkpoints,
    safe: Schedule,
    n_rollbacks: int,
    note: Callable[[str], None],
) -> tuple[TrainingRun, Position]:
    """``job`` by a safe schedule, a checkpoint further back with every rollback."""
    again = prepare(job.config, job.samples, safe)
    return again, _stand(again, checkpoints, _read(again, checkpoints, n_rollbacks, note))


def without_delay(schedule: Schedule) -> Schedule:
    """Data parallelism on the same stages, micro-batches and ranks.

    Raises:
        UserError: there is no such schedule.
    """
    if schedule.max_staleness == 0:
        return schedule
    try:
        found = replace(
            schedule,
            name="DP",
            timing=timing.simultaneous(schedule.n_stages, schedule.n_workers, schedule.accumulate),
            delay=0,
            chains="in_order",
        )
    except ValueError as error:
        found, reason = None, first_line(error)
    if found is None or found.n_ranks != schedule.n_ranks:
        reason = reason if found is None else f"it takes {found.n_ranks} ranks"
        raise UserError(
            f"guard=rollback goes on with data parallelism in the place of {schedule.name}, and"
            f" here that cannot be ({reason}): use guard=stop, or placement=per_microbatch"
        )
    return found


def _safe(job: TrainingRun) -> Schedule:
    """The schedule by which ``job`` goes on once it has diverged.

    Raises:
        UserError: there is none that its runtime can run.
    """
    found = without_delay(job.schedule)
    if not job.runtime.can_run(found):
        raise UserError(
            f"guard=rollback continues with {found.name}, which {type(job.runtime).__name__} cannot"
            " run: use guard=stop, or runtime=distributed"
        )
    return found


def _restored(
    job: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> tuple[TrainingRun, Position, bool]:
    """``job`` where its latest checkpoint was taken, and whether it had been rolled back by then.

    If so it is another job, which goes on without delay.
    """
    state = _read(job, checkpoints, 0, note)
    rolled_back = state.get("rolled_back")
    if not isinstance(rolled_back, bool):
        raise _misfit(checkpoints, "it does not tell whether the run had been rolled back")
    if rolled_back:
        job = prepare(job.config, job.samples, _safe(job))
        note("it had been rolled back, and goes on without delay")
    position = _stand(job, checkpoints, state)
    _check_ahead(job, position, changed_options(state.get("config"), job.config))
    return job, position, rolled_back


def _check_ahead(job: TrainingRun, position: Position, changed: str) -> None:
    """Refuse options that would only change what a run that has ended says that it was."""
    done, wanted = position.epoch, job.config.epochs
    if done > wanted:
        raise UserError(f"the run has done {done} epochs and epochs={wanted}: ask for more")
    if done == wanted and changed:
        raise UserError(
            f"the run has ended after {done} epochs, and nothing is left to train with {changed}:"
            " leave that out, or ask for more epochs"
        )


def _read(
    job: TrainingRun, checkpoints: Checkpoints, skip: int, note: Callable[[str], None]
) -> Mapping[str, Any]:
    """The latest checkpoint that is whole, but for ``skip`` of them. Every rank calls it."""
    state, damaged = checkpoints.load(job.runtime, skip)
    for text in damaged:
        note(f"{text}; the one before it was used")
    kept = state.get("config")
    free = INDIFFERENT if rate_follows_epochs(kept, job.config) else FREE
    if told := changed_options(kept, job.config, free):
        note(f"{RESUMED_OTHERWISE}: {told}")
    if (orders := _orders(job.config)) and state.get("orders") not in (None, orders):
        note(f"{job.config.schedule.file} has other orders than those of the checkpoint")
    return state


def _orders(config: DictConfig) -> str | None:
    """The rank orders of a schedule that is read from a file."""
    file = config.schedule.get("file")
    return Path(file).read_text() if file else None


def _stand(job: TrainingRun, checkpoints: Checkpoints, state: Mapping[str, Any]) -> Position:
    """Have ``job`` stand where ``state`` was taken."""
    try:
        job.runtime.load_state_dict(state["runtime"])
        return Position.of(state["position"])
    except (KeyError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _misfit(checkpoints, reason) from error


def _misfit(checkpoints: Checkpoints, reason: str) -> UserError:
    return UserError(f"the checkpoint in {checkpoints.folder} does not fit this run: {reason}")

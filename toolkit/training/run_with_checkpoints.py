"""A run that can be stopped, resumed and rolled back."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.options import INDIFFERENT, RESUMED_OTHERWISE
from toolkit.schedule import Schedule, timing
from toolkit.training.checkpoint import Checkpoints, from_rank_0
from toolkit.training.checkpoint_callback import CheckpointCallback, Signals
from toolkit.training.config_diff import FREE, changed_options, rate_follows_epochs
from toolkit.training.loop import DivergedError, Epoch, Position, Step
from toolkit.training.training_run import TrainingRun

_ROLLBACKS = 3
_FIRST_STRETCH = 8  # steps; those that are measured are not cut up


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        epochs: metrics of each epoch.
        notes: sentences on damaged or unwritten checkpoints, rollbacks and skipped updates.
        job: the run that ended; a new one after a rollback.
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
    """Train ``job``, with checkpoints in ``folder`` as ``job.options.save`` says.

    Args:
        job: an untrained run.
        folder: folder of the run, with its ``checkpoints``; rank 0's counts.
        resume: continue from the latest intact checkpoint; None: if there is one.
        weights: also keep the best checkpoint and the final weights.
        on_epoch: called with each epoch's metrics.
        on_step: called after each step.
        on_note: called with each note.
        signals: signals that end it; by default SIGTERM and SIGINT of this process.

    Raises:
        UserError: there is no checkpoint to resume from, or it is of another run; there are
            checkpoints and ``resume`` is False; the guard has no schedule to go back to.
        StoppedError: a signal has ended the run.
        DivergedError: the loss has diverged, and there is no way back.
    """
    save = job.options.save
    safe = check_saving(job)
    folder = from_rank_0(job.runtime, folder.resolve())
    checkpoints = Checkpoints(folder / "checkpoints", save.keep, sharded=save.sharded)
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
            saves = safe is not None or not save.never
            keeper = _callback(job, checkpoints, signals, saves, weights, rolled_back)
            if safe is not None and position is None:
                keeper.save(Position())
            try:
                epochs = job.run(on_epoch, on_step, position, keeper)
                keeper.write_model()
                notes += [*keeper.notes(), *job.skipped_updates()]
                return Outcome(epochs, notes, job, resumed_at)
            except DivergedError as error:
                notes += keeper.notes()
                if safe is None or n_rollbacks == most:
                    told = _no_way_back(error, safe, n_rollbacks)
                    raise DivergedError(told, error.epochs) from error
                job, rolled_back = job.again(safe), True
                # A checkpoint further back with every rollback.
                state = _read(job, checkpoints, n_rollbacks, note)
                position = _load(job, checkpoints, state)
                n_rollbacks += 1
                note(
                    f"{error}: rolled back to epoch {position.epoch}, step {position.step}, and"
                    f" went on{' without delay' * delayed}"
                )


def check_saving(job: TrainingRun) -> Schedule | None:
    """Return the schedule by which ``job`` continues after a rollback; None without one.

    Raises:
        UserError: ``guard=rollback``, and there is no such schedule that the runtime can run.
    """
    return _safe(job) if job.options.guard == "rollback" else None


def _callback(
    job: TrainingRun,
    checkpoints: Checkpoints,
    signals: Signals,
    saves: bool,
    weights: bool,
    rolled_back: bool,
) -> CheckpointCallback:
    options = job.options
    return CheckpointCallback(
        runtime=job.runtime,
        saves=saves,
        checkpoints=checkpoints,
        often=options.save,
        extra={
            # As text: what a damaged checkpoint holds here must not be compared as an object.
            "config": json.dumps(job.record),
            "orders": _orders(job.record),
            "rolled_back": rolled_back,
        },
        guard=options.guard,
        guard_factor=options.guard_factor,
        signals=signals,
        measure=job.samples.form.metric,
        epochs=options.epochs,
        weights=weights,
        length=max(_FIRST_STRETCH, getattr(job.runtime, "record", 0)),
    )


def _no_way_back(error: DivergedError, safe: Schedule | None, n_rollbacks: int) -> str:
    """Message for a run that ends because its loss has diverged."""
    tried = f", after {n_rollbacks} rollback{'s' * (n_rollbacks > 1)}" if n_rollbacks else ""
    back = "" if safe else " (guard=rollback returns to the last checkpoint)"
    return f"{error}{tried}: lower optimizer.lr, or warm up with lr.warmup_epochs{back}"


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
            f"guard=rollback replaces {schedule.name} by data parallelism, which is impossible"
            f" here ({reason}): use guard=stop, or placement=per_microbatch"
        )
    return found


def _safe(job: TrainingRun) -> Schedule:
    """The schedule by which ``job`` continues once it has diverged.

    Raises:
        UserError: its runtime cannot run such a schedule.
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
    """Load the latest checkpoint; build the run without delay if it had been rolled back.

    Returns:
        the run, its position, and whether it had been rolled back.
    """
    state = _read(job, checkpoints, 0, note)
    rolled_back = state.get("rolled_back")
    if not isinstance(rolled_back, bool):
        raise _misfit(checkpoints, "it lacks rolled_back")
    if rolled_back:
        job = job.again(_safe(job))
        note("it had been rolled back, and continues without delay")
    position = _load(job, checkpoints, state)
    done, wanted = position.epoch, job.options.epochs
    if done > wanted:
        raise UserError(f"the run has done {done} epochs and epochs={wanted}: ask for more")
    # Options of a finished run would only falsify its record.
    if done == wanted and (changed := changed_options(_recorded(state), job.record)):
        raise UserError(
            f"the run has ended after {done} epochs, and nothing is left to train with {changed}:"
            " leave that out, or ask for more epochs"
        )
    return job, position, rolled_back


def _read(
    job: TrainingRun, checkpoints: Checkpoints, skip: int, note: Callable[[str], None]
) -> Mapping[str, Any]:
    """The latest intact checkpoint, before the last ``skip``. Every rank calls it."""
    state, damaged = checkpoints.load(job.runtime, skip)
    for text in damaged:
        note(f"{text}; the one before it was used")
    kept = _recorded(state)
    follows = rate_follows_epochs(kept, job.options.epochs, job.lr)
    if changed := changed_options(kept, job.record, INDIFFERENT if follows else FREE):
        note(f"{RESUMED_OTHERWISE}: {changed}")
    if (orders := _orders(job.record)) and state.get("orders") not in (None, orders):
        note(f"{_file(job.record)} has other orders than those of the checkpoint")
    return state


def _recorded(state: Mapping[str, Any]) -> Any:
    """Options that ``state`` records; None if they are unreadable."""
    try:
        return json.loads(state["config"])
    except (KeyError, TypeError, ValueError):
        return None


def _file(record: Mapping[str, Any]) -> str | None:
    """The file that a schedule is read from, if it is."""
    return (record.get("schedule") or {}).get("file")


def _orders(record: Mapping[str, Any]) -> str | None:
    """The rank orders of a schedule that is read from a file."""
    file = _file(record)
    return Path(file).read_text() if file else None


def _load(job: TrainingRun, checkpoints: Checkpoints, state: Mapping[str, Any]) -> Position:
    """Load ``state`` into ``job``; return its position."""
    try:
        job.runtime.load_state_dict(state["runtime"])
        return Position.of(state["position"])
    except (KeyError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise _misfit(checkpoints, reason) from error


def _misfit(checkpoints: Checkpoints, reason: str) -> UserError:
    return UserError(f"the checkpoint in {checkpoints.folder} does not fit this run: {reason}")

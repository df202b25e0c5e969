"""A run that can be stopped, resumed and rolled back.

The training loop pauses every few seconds. At a pause all ranks exchange the signals they received,
save a checkpoint if one is due, and stop if a signal asks for it.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.options import INDIFFERENT, RESUMED_OTHERWISE
from toolkit.schedule import Schedule, timing
from toolkit.training.checkpoint import Checkpoints, from_rank_0
from toolkit.training.checkpoint_callback import CheckpointCallback
from toolkit.training.loop import DivergedError, Epoch, Position, Step
from toolkit.training.option_changes import FREE, changed_options, options_to_save
from toolkit.training.stop_signals import Signals
from toolkit.training.training_run import TrainingRun


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        epochs: metrics of each epoch.
        notes: sentences on damaged or unwritten checkpoints, rollbacks and skipped updates.
        run: the run that ended; a new one after a rollback.
        resumed_at: training steps that were done when it was resumed; 0 if it was not.
        weights_lost: whether the final weights should have been written, and could not be.
    """

    epochs: list[Epoch]
    notes: list[str]
    run: TrainingRun
    resumed_at: int = 0
    weights_lost: bool = False


@dataclass(frozen=True)
class Listeners:
    """What is called as a run trains.

    Attributes:
        on_epoch: called with each epoch's metrics.
        on_step: called after each step.
        on_note: called with each note.
    """

    on_epoch: Callable[[Epoch], None] = lambda epoch: None
    on_step: Callable[[Step], None] = lambda step: None
    on_note: Callable[[str], None] = lambda note: None


def run_with_checkpoints(
    run: TrainingRun,
    folder: Path,
    *,
    resume: bool | None = False,
    weights: bool = True,
    listeners: Listeners = Listeners(),
    signals: Signals | None = None,
) -> Outcome:
    """Train ``run``, with checkpoints in ``folder`` as ``run.options.save`` says.

    Args:
        run: an untrained run.
        folder: folder of the run, with its ``checkpoints``; rank 0's counts.
        resume: continue from the latest intact checkpoint; None: if there is one.
        weights: also keep the best checkpoint and the final weights.
        listeners: what is called as it trains.
        signals: signals that end it; by default SIGTERM and SIGINT of this process.

    Raises:
        UserError: there is no checkpoint to resume from, or it is of another run; there are
            checkpoints and ``resume`` is False; the guard has no schedule to go back to.
        StoppedError: a signal has ended the run.
        DivergedError: the loss has diverged, again after a rollback if the guard allows one.
    """
    has_delay = run.schedule.max_staleness > 0
    safe_schedule = rollback_schedule(run)
    checkpoints = _open_checkpoints(run, folder)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        listeners.on_note(text)

    run, position = _begin(run, checkpoints, resume, note)
    resumed_at = position.steps_done
    # From here on a signal ends the run at a pause, also while its last files are written.
    with (signals or Signals()).heard() as signals:
        callback = CheckpointCallback(run, checkpoints, signals, weights)
        if safe_schedule is not None and position.steps_done == 0:
            # To go back to, if the loss diverges before the next one.
            callback.save(position)
        reason = ""
        try:
            epochs = run.run(listeners.on_epoch, listeners.on_step, position, callback)
        except DivergedError as error:
            if safe_schedule is None:
                raise _without_way_back(error) from error
            # The way back is outside of this handler, whose traceback would keep the memory of
            # the run that is lost.
            reason = error.reason
        if reason and safe_schedule is not None:
            notes += callback.notes()
            run = run.again(safe_schedule)
            position = _rolled_back(run, checkpoints, note)
            note(_rollback_note(reason, position, has_delay))
            callback = CheckpointCallback(run, checkpoints, signals, weights)
            epochs = run.run(listeners.on_epoch, listeners.on_step, position, callback)
        written = callback.write_model()
    notes += [*callback.notes(), *run.skipped_updates()]
    return Outcome(epochs, notes, run, resumed_at, weights_lost=not written)


def _without_way_back(error: DivergedError) -> DivergedError:
    """Return the error of a run without a guard: it names the guard."""
    return DivergedError(error.reason, error.epochs, ", or take guard=rollback")


def _open_checkpoints(run: TrainingRun, folder: Path) -> Checkpoints:
    """Return the checkpoints in a run's folder, that of rank 0."""
    save = run.options.save
    folder = from_rank_0(run.runtime, folder.resolve())
    with suppress(OSError):  # here only: a folder that is removed later stays so
        folder.mkdir(parents=True, exist_ok=True)
    return Checkpoints(folder / "checkpoints", save.keep, sharded=save.sharded)


def _begin(
    run: TrainingRun,
    checkpoints: Checkpoints,
    resume: bool | None,
    note: Callable[[str], None],
) -> tuple[TrainingRun, Position]:
    """Return the run and where it begins: at its first step, or at its latest checkpoint."""
    has_checkpoints = bool(from_rank_0(run.runtime, checkpoints.paths()))
    if resume is False and has_checkpoints:
        raise UserError(
            f"{checkpoints.folder.parent} has the checkpoints of a run: give another folder, or"
            " resume=True"
        )
    if resume or (resume is None and has_checkpoints):
        return _resumed(run, checkpoints, note)
    return run, Position()


def _rollback_note(reason: str, position: Position, had_delay: bool) -> str:
    place = f"epoch {position.epoch}, step {position.step}"
    way = " without delay" if had_delay else ""
    return f"{reason}: rolled back to {place}, and continued{way}"


def rollback_schedule(run: TrainingRun) -> Schedule | None:
    """Return the schedule by which ``run`` continues after a rollback; None without that guard."""
    if run.options.guard != "rollback":
        return None
    schedule = without_delay(run.schedule)
    if not run.runtime.can_run(schedule):
        raise UserError(
            f"guard=rollback continues with {schedule.name}, which {type(run.runtime).__name__}"
            " cannot run: use guard=stop, or runtime=distributed"
        )
    return schedule


def without_delay(schedule: Schedule) -> Schedule:
    """Return data parallelism on the same stages, micro-batches and ranks; else UserError."""
    schedule = schedule.final
    if schedule.max_staleness == 0:
        return schedule
    # The same ops on the same ranks, all workers at the same time: an update of a step is then
    # before the next step's first forward, so nothing is late.
    simultaneous = timing.simultaneous(
        schedule.n_stages, schedule.n_workers, schedule.accumulate
    )
    try:
        undelayed = replace(
            schedule, name="DP", timing=simultaneous, delay=0, chains="in_order"
        )
    except ValueError:
        undelayed = schedule
    if undelayed.n_ranks != schedule.n_ranks or undelayed.max_staleness:
        raise UserError(
            f"guard=rollback replaces {schedule.name} by data parallelism, which is impossible on"
            f" its {schedule.n_ranks} ranks: use guard=stop, or placement=per_microbatch"
        )
    return undelayed


def _resumed(
    run: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> tuple[TrainingRun, Position]:
    """Load the latest checkpoint; return the run and its position."""
    state = _read(run, checkpoints, note)
    if state["run"]["position"].get("rolled_back"):
        run = run.again(without_delay(run.schedule))
        note("it had been rolled back, and continues without delay")
    position = _load(run, checkpoints, state)
    n_epochs_done, n_epochs = position.epoch, run.options.epochs
    if n_epochs_done > n_epochs:
        raise UserError(
            f"the run has done {n_epochs_done} epochs and epochs={n_epochs}: ask for more"
        )
    # Options of a finished run would only falsify its record.
    change = changed_options(state["run"]["options"], options_to_save(run))
    if change and n_epochs_done == n_epochs:
        raise UserError(
            f"the run has ended after {n_epochs_done} epochs, and nothing is left to train with"
            f" {change}: leave that out, or ask for more epochs"
        )
    return run, position


def _rolled_back(
    run: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> Position:
    """Load the latest checkpoint into a run without delay; return its position."""
    state = _read(run, checkpoints, note)
    state["run"]["position"]["rolled_back"] = True
    return _load(run, checkpoints, state)


def _read(
    run: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the latest intact checkpoint. Every rank calls it."""
    state, damaged = checkpoints.load(run.runtime)
    for text in damaged:
        note(f"{text}; the one before it was used")
    with _refuse_misfits(checkpoints):
        state["run"] = json.loads(state["run"])
    # More epochs may be asked for if that leaves the rates of the epochs before as they were.
    saved_options = state["run"]["options"]
    n_epochs = run.options.epochs
    n_saved_epochs = saved_options.get("epochs") or n_epochs
    # Rates of the epochs of both, a quarter of an epoch apart; a cosine's depend on their number.
    quarters = range(4 * min(n_epochs, n_saved_epochs))
    factors = [run.lr.factor(quarter, 4, n_epochs, 1) for quarter in quarters]
    saved_factors = [
        run.lr.factor(quarter, 4, n_saved_epochs, 1) for quarter in quarters
    ]
    free_options = FREE if factors == saved_factors else INDIFFERENT
    change = changed_options(saved_options, options_to_save(run), free_options)
    if change:
        note(f"{RESUMED_OTHERWISE}: {change}")
    return state


def _load(
    run: TrainingRun, checkpoints: Checkpoints, state: Mapping[str, Any]
) -> Position:
    """Load ``state`` into ``run``; return its position."""
    position = state["run"]["position"]
    with _refuse_misfits(checkpoints):
        switching_state = position.get("switching")
        if switching_state and not position.get("rolled_back"):
            if run.switching is None:
                raise UserError(
                    "the run chose its schedules: give its switch.candidates"
                )
            run.switching.resume(switching_state)
        run.runtime.load_state_dict(state["runtime"])
    # JSON has made plain dictionaries of these.
    history = [Epoch(**epoch) for epoch in position["history"]]
    return Position(**position | {"history": history})


@contextmanager
def _refuse_misfits(checkpoints: Checkpoints) -> Iterator[None]:
    """Raise UserError if the state of a checkpoint is not that of the run."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise UserError(
            f"the checkpoint in {checkpoints.folder} does not fit this run: {reason}"
        ) from error

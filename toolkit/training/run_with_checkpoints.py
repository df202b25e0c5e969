"""A run that can be stopped, resumed and rolled back."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.options import INDIFFERENT, RESUMED_OTHERWISE, differing, flat, without
from toolkit.schedule import Schedule, timing
from toolkit.training.checkpoint import Checkpoints, from_rank_0
from toolkit.training.checkpoint_callback import CheckpointCallback, Signals, full_record
from toolkit.training.loop import DivergedError, Epoch, Position, Step
from toolkit.training.training_run import TrainingRun

_ROLLBACKS = 3
_MOST_SHOWN = 4  # options that differ
_FREE = INDIFFERENT | {"epochs"}  # a run may continue for longer than was planned


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        epochs: metrics of each epoch.
        notes: sentences on damaged or unwritten checkpoints, rollbacks and skipped updates.
        run: the run that ended; a new one after a rollback.
        resumed_at: training steps that were done when it was resumed; 0 if it was not.
    """

    epochs: list[Epoch]
    notes: list[str]
    run: TrainingRun
    resumed_at: int = 0


def run_with_checkpoints(
    run: TrainingRun,
    folder: Path,
    *,
    resume: bool | None = False,
    weights: bool = True,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    on_step: Callable[[Step], None] = lambda step: None,
    on_note: Callable[[str], None] = lambda note: None,
    signals: Signals | None = None,
) -> Outcome:
    """Train ``run``, with checkpoints in ``folder`` as ``run.options.save`` says.

    Args:
        run: an untrained run.
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
    save, safe = run.options.save, rollback_schedule(run)
    folder = from_rank_0(run.runtime, folder.resolve())
    checkpoints = Checkpoints(folder / "checkpoints", save.keep, sharded=save.sharded)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        on_note(text)

    saved = checkpoints.any(run.runtime)
    if resume is False and saved:
        raise UserError(
            f"{folder} has the checkpoints of a run: give another folder, or resume=True"
        )
    delayed = run.schedule.max_staleness > 0
    position, rolled_back = None, False
    if resume or (resume is None and saved):
        run, position, rolled_back = _resumed(run, checkpoints, note)
    resumed_at = position.steps_done if position else 0
    n_rollbacks, most = 0, _ROLLBACKS if delayed else 1  # or the same would come again
    with (signals or Signals()).heard() as signals:
        while True:
            callback = CheckpointCallback(
                run, checkpoints, signals, weights=weights, rolled_back=rolled_back
            )
            if safe is not None and position is None:
                callback.save(Position())
            try:
                epochs = run.run(on_epoch, on_step, position, callback)
                callback.write_model()
                notes += [*callback.notes(), *run.skipped_updates()]
                return Outcome(epochs, notes, run, resumed_at)
            except DivergedError as error:
                notes += callback.notes()
                if safe is None or n_rollbacks == most:
                    tried = f" (after {n_rollbacks} rollbacks)" if n_rollbacks else ""
                    way_back = "" if safe else ", or take guard=rollback"
                    raise DivergedError(f"{error.reason}{tried}", error.epochs, way_back) from error
                run, rolled_back = run.again(safe), True
                # A checkpoint further back with every rollback.
                position = _load(run, checkpoints, _read(run, checkpoints, n_rollbacks, note))
                n_rollbacks += 1
                note(
                    f"{error.reason}: rolled back to epoch {position.epoch}, step {position.step},"
                    f" and continued{' without delay' * delayed}"
                )


def rollback_schedule(run: TrainingRun) -> Schedule | None:
    """Return the schedule by which ``run`` continues after a rollback; None without one.

    Raises:
        UserError: ``guard=rollback``, and there is no such schedule that the runtime can run.
    """
    if run.options.guard != "rollback":
        return None
    found = without_delay(run.schedule)
    if not run.runtime.can_run(found):
        raise UserError(
            f"guard=rollback continues with {found.name}, which {type(run.runtime).__name__} cannot"
            " run: use guard=stop, or runtime=distributed"
        )
    return found


def without_delay(schedule: Schedule) -> Schedule:
    """Return data parallelism on the same stages, micro-batches and ranks.

    Raises:
        UserError: there is no such schedule.
    """
    if schedule.max_staleness == 0:
        return schedule
    simultaneous = timing.simultaneous(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    try:
        found = replace(schedule, name="DP", timing=simultaneous, delay=0, chains="in_order")
        reason = f"it takes {found.n_ranks} ranks" if found.n_ranks != schedule.n_ranks else ""
    except ValueError as error:
        reason = first_line(error)
    if reason:
        raise UserError(
            f"guard=rollback replaces {schedule.name} by data parallelism, which is impossible"
            f" here ({reason}): use guard=stop, or placement=per_microbatch"
        )
    return found


def changed_options(before: object, now: Mapping[str, Any], free: Collection[str] = _FREE) -> str:
    """Describe differing options that change the trajectory; empty if no option does.

    An option that one side lacks is None there.

    Args:
        before: recorded options; anything but a mapping is unknown, and nothing is reported.
        now: options of the run.
        free: options, or groups of them, that may differ.
    """
    if not isinstance(before, Mapping):
        return ""
    old, new = (without(flat(options), free) for options in (before, now))
    known = dict.fromkeys(sorted(old.keys() | new.keys()))
    names = differing([known | old, known | new])
    shown = [f"{name}={new.get(name)} (was {old.get(name)})" for name in names[:_MOST_SHOWN]]
    more = [f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
    return ", ".join([*shown, *more])


def _resumed(
    run: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> tuple[TrainingRun, Position, bool]:
    """Load the latest checkpoint; build the run without delay if it had been rolled back.

    Returns:
        the run, its position, and whether it had been rolled back.
    """
    state = _read(run, checkpoints, 0, note)
    if rolled_back := state["run"]["rolled_back"]:
        run = run.again(without_delay(run.schedule))
        note("it had been rolled back, and continues without delay")
    position = _load(run, checkpoints, state)
    done, wanted = position.epoch, run.options.epochs
    if done > wanted:
        raise UserError(f"the run has done {done} epochs and epochs={wanted}: ask for more")
    # Options of a finished run would only falsify its record.
    if done == wanted and (changed := changed_options(state["run"]["options"], full_record(run))):
        raise UserError(
            f"the run has ended after {done} epochs, and nothing is left to train with {changed}:"
            " leave that out, or ask for more epochs"
        )
    return run, position, rolled_back


def _read(
    run: TrainingRun, checkpoints: Checkpoints, skip: int, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the latest intact checkpoint, before the last ``skip``. Every rank calls it."""
    state, damaged = checkpoints.load(run.runtime, skip)
    for text in damaged:
        note(f"{text}; the one before it was used")
    try:
        state["run"] = json.loads(state["run"])
    except (KeyError, TypeError) as error:
        raise _misfit(checkpoints, error) from error
    before = state["run"]["options"]
    free = INDIFFERENT if _rates_differ(run, before.get("epochs")) else _FREE
    if changed := changed_options(before, full_record(run), free):
        note(f"{RESUMED_OTHERWISE}: {changed}")
    return state


def _rates_differ(run: TrainingRun, planned: Any) -> bool:
    """Return whether ``planned`` epochs give the epochs of both runs other learning rates.

    Half a cosine over all epochs does; steps every so many epochs do not.
    """
    epochs = run.options.epochs
    if not isinstance(planned, int):
        return False
    quarters = range(4 * min(planned, epochs))
    return any(run.lr.factor(k, 4, planned, 1) != run.lr.factor(k, 4, epochs, 1) for k in quarters)


def _load(run: TrainingRun, checkpoints: Checkpoints, state: Mapping[str, Any]) -> Position:
    """Load ``state`` into ``run``; return its position."""
    try:
        run.runtime.load_state_dict(state["runtime"])
    except (KeyError, ValueError) as error:
        raise _misfit(checkpoints, error) from error
    position = state["run"]["position"]
    return Position(**position | {"history": [Epoch(**epoch) for epoch in position["history"]]})


def _misfit(checkpoints: Checkpoints, error: Exception) -> UserError:
    reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    return UserError(f"the checkpoint in {checkpoints.folder} does not fit this run: {reason}")

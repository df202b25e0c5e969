"""A run that can be stopped, resumed and rolled back.

The training loop pauses every few seconds. At a pause all ranks exchange the signals they received,
save a checkpoint if one is due, and stop if a signal asks for it.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.options import INDIFFERENT, RESUMED_OTHERWISE, differing, flat, without
from toolkit.schedule import Schedule, timing
from toolkit.training.checkpoint import Checkpoints, from_rank_0, write
from toolkit.training.loop import DivergedError, Epoch, LoopCallback, Position, Step, is_best
from toolkit.training.training_run import TrainingRun

ECHO = 2.0
"""Seconds in which a repeated signal counts as the same one: torchrun passes to its ranks what
Slurm sends to every process."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE = 5.0  # seconds between two pauses
_FIRST_STEPS = 8  # before the first pause; measured steps are not cut up
_MOST_SHOWN = 4  # options that differ
_FREE = INDIFFERENT | {"epochs"}  # a run may continue for longer than was planned


class StoppedError(Exception):
    """The signal ``number`` ended the run, after a checkpoint if it was ``saved``."""

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.saved = saved


@dataclass
class Signals:
    """SIGTERM, SIGINT and SIGHUP, remembered until the run can pause; a second ends it at once."""

    number: int = 0  # that this process received; 0: none
    agreed: int = 0  # that all ranks know of; 0: none
    at: float = 0.0  # time of the first, in seconds

    @contextmanager
    def heard(self) -> Iterator["Signals"]:
        """Handle the signals, except SIGHUP under nohup; without effect outside the main thread."""
        ignored_signals = (
            {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        )
        try:
            earlier_handlers = {
                signal_number: signal.signal(signal_number, self._hear)
                for signal_number in _SIGNALS
                if signal_number not in ignored_signals
            }
        except ValueError:
            earlier_handlers = {}
        try:
            yield self
        finally:
            for number, handler in earlier_handlers.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number = number
            self.at = now
        elif now - self.at >= ECHO:
            raise KeyboardInterrupt


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
        DivergedError: the loss has diverged, again after a rollback if the guard allows one.
    """
    save, safe_schedule = run.options.save, rollback_schedule(run)
    folder = from_rank_0(run.runtime, folder.resolve())
    with suppress(OSError):  # here only: a folder that is removed later stays so
        folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints", save.keep, sharded=save.sharded)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        on_note(text)

    has_checkpoints = bool(from_rank_0(run.runtime, checkpoints.paths()))
    if resume is False and has_checkpoints:
        raise UserError(
            f"{folder} has the checkpoints of a run: give another folder, or resume=True"
        )
    has_delay = run.schedule.max_staleness > 0
    position = Position()
    if resume or (resume is None and has_checkpoints):
        run, position = _resumed(run, checkpoints, note)
    resumed_at = position.steps_done
    with (signals or Signals()).heard() as signals:
        callback = CheckpointCallback(run, checkpoints, signals, weights)
        if safe_schedule is not None and position.steps_done == 0:
            callback.save(position)
        divergence_reason = ""
        try:
            epochs = run.run(on_epoch, on_step, position, callback)
        except DivergedError as error:
            if safe_schedule is None:
                way_back = ", or take guard=rollback"
                raise DivergedError(error.reason, error.epochs, way_back) from error
            divergence_reason = error.reason
        # Outside of the handler, whose traceback would keep the memory of the run that is lost.
        if divergence_reason and safe_schedule is not None:
            notes += callback.notes()
            run = run.again(safe_schedule)
            state = _read(run, checkpoints, note)
            state["run"]["position"]["rolled_back"] = True
            position = _load(run, checkpoints, state)
            note(
                f"{divergence_reason}: rolled back to epoch {position.epoch}, step {position.step},"
                f" and continued{' without delay' * has_delay}"
            )
            callback = CheckpointCallback(run, checkpoints, signals, weights)
            epochs = run.run(on_epoch, on_step, position, callback)
        written = callback.write_model()
    notes += [*callback.notes(), *run.skipped_updates()]
    return Outcome(epochs, notes, run, resumed_at, weights_lost=not written)


class CheckpointCallback(LoopCallback):
    """Save checkpoints and stop at signals, at the pauses of the loop."""

    def __init__(
        self,
        run: TrainingRun,
        checkpoints: Checkpoints,
        signals: Signals,
        weights: bool = True,
    ) -> None:
        self.run = run
        self.runtime = run.runtime
        self.checkpoints = checkpoints
        self.signals = signals
        self.weights = weights
        # A rollback needs a checkpoint.
        self.saves = run.options.guard == "rollback" or not run.options.save.never
        self.record = full_record(run)
        self.unwritten: list[str] = []
        self.n_steps = max(_FIRST_STEPS, getattr(run.runtime, "record", 0))
        self._saved_at = self._begun = time.monotonic()

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps until the next pause, which is where a checkpoint is due if any is."""
        self._begun = time.monotonic()
        save_steps = self.run.options.save.steps
        return (
            min(self.n_steps, save_steps - position.steps_done % save_steps)
            if save_steps
            else self.n_steps
        )

    def end(self, position: Position) -> None:
        """Exchange received signals with all ranks, save if due, and set the steps to the next.

        Raises:
            StoppedError: a rank received a signal before the last epoch ended.
        """
        now = time.monotonic()
        own_values = [0.0, 0.0, *(float(self.signals.number == number) for number in _SIGNALS)]
        if self.runtime.rank == 0:
            own_values[:2] = [now - self._saved_at, now - self._begun]
        # All ranks must decide the same: only rank 0's clock counts, and a signal to any rank.
        total = self.runtime.total(torch.tensor(own_values, dtype=torch.float64)).tolist()
        seconds_since_save, seconds_trained, *n_ranks_of_signal = total
        heard_signals = [
            number for number, n_ranks in zip(_SIGNALS, n_ranks_of_signal, strict=True) if n_ranks
        ]
        save_options = self.run.options.save
        is_due = (
            (save_options.steps is not None and position.steps_done % save_options.steps == 0)
            or (
                save_options.epochs is not None
                and not (position.step or position.epoch % save_options.epochs)
            )
            or (
                save_options.minutes is not None and seconds_since_save >= 60 * save_options.minutes
            )
            or self._is_best(position)
            or bool(heard_signals)
        )
        written = is_due and self.saves and self.save(position)
        if heard_signals:
            self.signals.agreed = heard_signals[0]
            if position.epoch < self.run.options.epochs:
                raise StoppedError(heard_signals[0], saved=written)
        if seconds_trained < _PAUSE / 2:
            self.n_steps *= 2
        elif seconds_trained > _PAUSE and self.n_steps > 1:
            self.n_steps //= 2

    def save(self, position: Position) -> bool:
        """Write a checkpoint; return False, and let the run continue, if it cannot be written."""
        self._saved_at = time.monotonic()
        # As text: what a damaged checkpoint holds here is then read whole, or not at all.
        run_state = {"run": json.dumps({"position": asdict(position), "options": self.record})}
        best, step = self._is_best(position), position.steps_done
        try:
            self.checkpoints.save(self.runtime, run_state, step, best=best)
        except OSError as error:
            self._not_written(f"the checkpoint of step {step}", error)
            return False
        return True

    def write_model(self) -> bool:
        """Write the final weights, for any program that has the model; False if that fails."""
        if not (self.saves and self.weights):
            return True
        # Every rank makes these calls, since they are collective.
        weights: Mapping[str, torch.Tensor] = self.runtime.module().state_dict()
        if self.run.options.readout == "extrapolated":
            weights = {**weights, **self.runtime.extrapolated()}
        path = self.checkpoints.folder.parent / "model.pt"
        try:
            if self.runtime.rank == 0:
                state = tree_map_only(torch.Tensor, torch.Tensor.cpu, dict(weights))
                write(path, state, plain=True)
        except OSError as error:
            self._not_written(f"the weights, {path}", error)
            return False
        return True

    def notes(self) -> list[str]:
        """Return a sentence on what could not be written, if anything."""
        if not self.unwritten:
            return []
        first_and_last = dict.fromkeys([self.unwritten[0], self.unwritten[-1]])
        return [f"not written ({len(self.unwritten)} in all): {'; '.join(first_and_last)}"]

    def _not_written(self, what: str, error: OSError) -> None:
        """Note a failed write, and print the first one on rank 0."""
        text = f"{what}: {error.filename or self.checkpoints.folder}: {error.strerror}"
        if self.runtime.rank == 0 and not self.unwritten:
            print(f"warning: not written: {text}; training continues", file=sys.stderr)
        self.unwritten.append(text)

    def _is_best(self, position: Position) -> bool:
        """Return whether an epoch has just ended whose weights are to be kept as the best."""
        epoch_ended = self.weights and position.history and not position.step
        return bool(epoch_ended) and is_best(position.history, self.run.samples.form.metric)


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
    simultaneous = timing.simultaneous(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    try:
        undelayed = replace(schedule, name="DP", timing=simultaneous, delay=0, chains="in_order")
    except ValueError:
        undelayed = schedule
    if undelayed.n_ranks != schedule.n_ranks or undelayed.max_staleness:
        raise UserError(
            f"guard=rollback replaces {schedule.name} by data parallelism, which is impossible on"
            f" its {schedule.n_ranks} ranks: use guard=stop, or placement=per_microbatch"
        )
    return undelayed


def full_record(run: TrainingRun) -> Mapping[str, Any]:
    """Return the options of ``run``, and a digest of the rank orders that it reads from a file."""
    file = (run.record.get("schedule") or {}).get("file")
    digest = sha256(Path(file).read_bytes()).hexdigest()[:12] if file else None
    return {**run.record, "orders": digest}


def changed_options(
    before: Mapping[str, Any], now: Mapping[str, Any], free: Collection[str] = _FREE
) -> str:
    """Describe the options that differ, except ``free`` ones; a missing option counts as None."""
    earlier_values, new_values = (without(flat(options), free) for options in (before, now))
    option_names = dict.fromkeys(sorted(earlier_values.keys() | new_values.keys()))
    names = differing([option_names | earlier_values, option_names | new_values])
    changes = [
        f"{name}={new_values.get(name)} (was {earlier_values.get(name)})"
        for name in names[:_MOST_SHOWN]
    ]
    rest_note = [f"and {len(names) - _MOST_SHOWN} more"] if len(names) > _MOST_SHOWN else []
    return ", ".join([*changes, *rest_note])


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
    if n_epochs_done == n_epochs and (
        change := changed_options(state["run"]["options"], full_record(run))
    ):
        raise UserError(
            f"the run has ended after {n_epochs_done} epochs, and nothing is left to train with"
            f" {change}: leave that out, or ask for more epochs"
        )
    return run, position


def _read(
    run: TrainingRun, checkpoints: Checkpoints, note: Callable[[str], None]
) -> dict[str, Any]:
    """Return the latest intact checkpoint. Every rank calls it."""
    state, damaged = checkpoints.load(run.runtime)
    for text in damaged:
        note(f"{text}; the one before it was used")
    with _refuse_misfits(checkpoints):
        state["run"] = json.loads(state["run"])
    saved_options = state["run"]["options"]
    epochs = (run.options.epochs, saved_options.get("epochs") or run.options.epochs)
    # Rates of the epochs of both, a quarter of an epoch apart; a cosine's depend on their number.
    factors = [
        [run.lr.factor(quarter, 4, n_epochs, 1) for quarter in range(4 * min(epochs))]
        for n_epochs in epochs
    ]
    free_options = _FREE if factors[0] == factors[1] else INDIFFERENT
    if change := changed_options(saved_options, full_record(run), free_options):
        note(f"{RESUMED_OTHERWISE}: {change}")
    return state


def _load(run: TrainingRun, checkpoints: Checkpoints, state: Mapping[str, Any]) -> Position:
    """Load ``state`` into ``run``; return its position."""
    position = state["run"]["position"]
    with _refuse_misfits(checkpoints):
        if (switching_state := position.get("switching")) and not position.get("rolled_back"):
            if run.switching is None:
                raise UserError("the run chose its schedules: give its switch.candidates")
            run.switching.resume(switching_state)
        run.runtime.load_state_dict(state["runtime"])
    return Position(**position | {"history": [Epoch(**epoch) for epoch in position["history"]]})


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

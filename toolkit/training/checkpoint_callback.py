"""At the pauses of the training loop: save checkpoints, stop at a signal, and watch the loss."""

import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from toolkit.runtime.process_group.watch import ECHO
from toolkit.training.checkpoint import Checkpoints, write
from toolkit.training.loop import LoopCallback, Position, diverged, is_best
from toolkit.training.training_run import TrainingRun

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE = 5.0  # seconds between two pauses, in which ranks exchange the signals they received
_FIRST_STEPS = 8  # before the first pause; measured steps are not cut up


class StoppedError(Exception):
    """A signal ended the run, after a checkpoint if the run saves any.

    Args:
        number: the signal.
        saved: whether a checkpoint was written.
    """

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.saved = saved


@dataclass
class Signals:
    """SIGTERM, SIGINT and SIGHUP, remembered until the run can pause; a second ends it at once.

    Attributes:
        number: the signal that this process received; 0: none.
        agreed: the signal that all ranks know of; 0: none.
        at: time of the signal, in seconds.
    """

    number: int = 0
    agreed: int = 0
    at: float = 0.0

    @contextmanager
    def heard(self) -> Iterator["Signals"]:
        """Handle the signals, except SIGHUP under nohup; without effect outside the main thread."""
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        try:
            before = {n: signal.signal(n, self._hear) for n in _SIGNALS if n not in ignored}
        except ValueError:
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.number:
            self.number, self.at = number, now
        elif now - self.at >= ECHO:
            raise KeyboardInterrupt


class CheckpointCallback(LoopCallback):
    """Saves, stops and watches a run at the pauses of its loop.

    Args:
        run: the run, whose options say when to save and what to do if the loss diverges.
        checkpoints: its checkpoints.
        signals: signals that end the run.
        weights: whether to keep the best checkpoint and the final weights.
        rolled_back: whether the run had diverged and was rolled back.
    """

    def __init__(
        self,
        run: TrainingRun,
        checkpoints: Checkpoints,
        signals: Signals,
        *,
        weights: bool = True,
        rolled_back: bool = False,
    ) -> None:
        self.run, self.runtime, self.checkpoints = run, run.runtime, checkpoints
        self.signals, self.weights, self.rolled_back = signals, weights, rolled_back
        # A rollback needs a checkpoint.
        self.saves = run.options.guard == "rollback" or not run.options.save.never
        self.measure = run.samples.form.metric
        self.record = full_record(run)
        self.unwritten: list[str] = []
        self.n_steps = max(_FIRST_STEPS, getattr(run.runtime, "record", 0))
        self._saved_at = self._begun = time.monotonic()

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps until the next pause, which is where a checkpoint is due if any is."""
        self._begun = time.monotonic()
        every = self.run.options.save.steps
        return min(self.n_steps, every - position.steps_done % every) if every else self.n_steps

    def check(self, loss: float, position: Position, which: str = "training") -> None:
        """Raise DivergedError if the loss is not finite or too large, and the guard is on."""
        options = self.run.options
        limit = options.guard_factor * position.first_loss if which == "training" else inf
        if options.guard != "off" and (not isfinite(loss) or loss > limit):
            raise diverged(loss, position, which)

    def end(self, position: Position) -> None:
        """Exchange received signals with all ranks, save if due, and set the steps to the next.

        Raises:
            StoppedError: a rank received a signal before the last epoch ended.
        """
        now = time.monotonic()
        mine = [0.0, 0.0, *(float(self.signals.number == number) for number in _SIGNALS)]
        if self.runtime.rank == 0:
            mine[:2] = [now - self._saved_at, now - self._begun]
        # Ranks decide alike: by rank 0's clock, and by the signals of any of them.
        total = self.runtime.total(torch.tensor(mine, dtype=torch.float64)).tolist()
        since, trained, *counts = total
        heard = [number for number, n_ranks in zip(_SIGNALS, counts, strict=True) if n_ranks]
        due = self._is_due(position, since) or (self.weights and self._is_best(position))
        written = (due or bool(heard)) and self.saves and self.save(position)
        if heard:
            self.signals.agreed = heard[0]
            if position.epoch < self.run.options.epochs:
                raise StoppedError(heard[0], saved=written)
        if trained < _PAUSE / 2:
            self.n_steps *= 2
        elif trained > _PAUSE and self.n_steps > 1:
            self.n_steps //= 2

    def save(self, position: Position) -> bool:
        """Write a checkpoint; return False, and let the run continue, if it cannot be written."""
        self._saved_at = time.monotonic()
        # As text: what a damaged checkpoint holds here is then read whole, or not at all.
        progress = {"position": asdict(position), "rolled_back": self.rolled_back}
        rest = {"run": json.dumps(progress | {"options": self.record})}
        best = self.weights and self._is_best(position)
        try:
            self.checkpoints.save(self.runtime, rest, position.steps_done, best=best)
        except OSError as error:
            self._not_written(f"the checkpoint of step {position.steps_done}", error)
            return False
        return True

    def write_model(self) -> None:
        """Write the final weights, for any program that has the model."""
        if not (self.saves and self.weights):
            return
        model = self.runtime.module()  # a collective call
        path = self.checkpoints.folder.parent / "model.pt"
        if self.runtime.rank == 0:
            try:
                state = tree_map_only(torch.Tensor, torch.Tensor.cpu, model.state_dict())
                write(path, state, plain=True)
            except OSError as error:
                self._not_written(f"the weights, {path}", error)

    def notes(self) -> list[str]:
        """Return a sentence on what could not be written, if anything."""
        if not self.unwritten:
            return []
        first, *later = self.unwritten
        more = [f"and {len(later) - 1} more"] if len(later) > 1 else []
        return [f"not written: {'; '.join([first, *more, *later[-1:]])}"]

    def _not_written(self, what: str, error: OSError) -> None:
        text = f"{what}: {error.filename or self.checkpoints.folder}: {error.strerror}"
        if self.runtime.rank == 0 and not self.unwritten:
            print(f"warning: not written: {text}; training continues", file=sys.stderr)
        self.unwritten.append(text)

    def _is_due(self, position: Position, seconds: float) -> bool:
        """Return whether to save at ``position``, ``seconds`` after the last checkpoint."""
        save = self.run.options.save
        return (
            (save.steps is not None and position.steps_done % save.steps == 0)
            or (save.epochs is not None and not position.step and not position.epoch % save.epochs)
            or (save.minutes is not None and seconds >= 60 * save.minutes)
        )

    def _is_best(self, position: Position) -> bool:
        """Return whether an epoch has just ended, and is the best so far."""
        ended = position.step == 0 and bool(position.history)
        return ended and is_best(position.history, self.measure)


def full_record(run: TrainingRun) -> Mapping[str, Any]:
    """Return the options of ``run``, and a digest of the rank orders that it reads from a file."""
    file = (run.record.get("schedule") or {}).get("file")
    digest = sha256(Path(file).read_bytes()).hexdigest()[:12] if file else None
    return {**run.record, "orders": digest}

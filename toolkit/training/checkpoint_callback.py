"""Between stretches of training: save checkpoints, stop at a signal, and watch the loss."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from toolkit.metric import Metric
from toolkit.options import SaveOptions
from toolkit.runtime.base import Runtime
from toolkit.runtime.process_group.watch import ECHO
from toolkit.training.checkpoint import Checkpoints, serialised, write_bytes
from toolkit.training.loop import DivergedError, Position, Stretches, is_best

_WEIGHTS = "the weights"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE = 5.0  # seconds between two pauses, in which ranks exchange the signals they received


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


@dataclass
class CheckpointCallback(Stretches):
    """Saves, stops and watches a run at the pauses between its stretches.

    Args:
        runtime: the runtime that trains.
        saves: whether checkpoints are saved.
        checkpoints: the run's checkpoints.
        often: when checkpoints are saved.
        extra: what a checkpoint holds besides the runtime's state and the position.
        guard: ``off``, or raise :class:`DivergedError` where the loss is not finite or, in
            training, more than ``guard_factor`` times that of the first step.
        guard_factor: see ``guard``.
        signals: signals that end the run.
        measure: metric that decides which checkpoint is the best.
        epochs: epochs of the run; after the last, no signal stops it.
        weights: whether to keep the best checkpoint and the final weights.
        length: training steps of the first stretch; later ones are longer or shorter, to take some
            seconds.

    Attributes:
        unwritten: what could not be written.
    """

    runtime: Runtime
    saves: bool
    checkpoints: Checkpoints
    often: SaveOptions
    extra: Mapping[str, Any]
    guard: str
    guard_factor: float
    signals: Signals
    measure: Metric
    epochs: int
    weights: bool = True
    length: int = 8
    unwritten: list[str] = field(default_factory=list)
    _saved_at: float = field(default_factory=time.monotonic)
    _begun: float = 0.0

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps of the next stretch, which ends at ``often.steps`` at the latest."""
        self._begun = time.monotonic()
        every = self.often.steps
        return min(self.length, every - position.steps_done % every) if every else self.length

    def check(self, loss: float, position: Position, which: str = "training") -> None:
        """Check the loss of a stretch, or of the test.

        Raises:
            DivergedError: the guard is on, and the loss is not finite or too large.
        """
        limit = self.guard_factor * position.first_loss if which == "training" else inf
        if self.guard != "off" and (not isfinite(loss) or loss > limit):
            before = f" and was {position.first_loss:.4g} at first" if isfinite(loss) else ""
            raise DivergedError(
                f"the {which} loss of epoch {position.epoch} is {loss:.4g}{before}",
                position.history,
            )

    def end(self, position: Position) -> None:
        """Exchange received signals with all ranks, save if due, and set the next length.

        Raises:
            StoppedError: a rank received a signal before the last epoch ended.
        """
        trained = time.monotonic() - self._begun
        mine = [0.0, 0.0, *(float(self.signals.number == number) for number in _SIGNALS)]
        if self._leads:
            mine[:2] = [time.monotonic() - self._saved_at, trained]
        # Ranks decide alike: by rank 0's clock, and by the signals of any of them.
        total = self.runtime.total(torch.tensor(mine, dtype=torch.float64)).tolist()
        since, trained, *counts = total
        heard = [number for number, n_ranks in zip(_SIGNALS, counts, strict=True) if n_ranks]
        due = self._is_due(position, since) or (self.weights and self._is_new_best(position))
        written = (due or bool(heard)) and self.saves and self.save(position)
        if heard:
            self.signals.agreed = heard[0]
            if position.epoch < self.epochs:
                raise StoppedError(heard[0], saved=written)
        if trained < _PAUSE / 2:
            self.length *= 2
        elif trained > _PAUSE and self.length > 1:
            self.length //= 2

    def save(self, position: Position) -> bool:
        """Write a checkpoint; return False, and let the run continue, if it cannot be written."""
        self._saved_at = time.monotonic()
        rest = {"position": position.state_dict(), **self.extra}
        ended = position.step == 0 and bool(position.history)
        best = self.weights and ended and is_best(position.history, self.measure)
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
        if self._leads:
            try:
                state = tree_map_only(torch.Tensor, torch.Tensor.cpu, model.state_dict())
                write_bytes(path, serialised(state))
            except OSError as error:
                self._not_written(f"{_WEIGHTS}, {path}", error)

    def notes(self) -> list[str]:
        """Return a sentence on what could not be written, if anything."""
        if not self.unwritten:
            return []
        first, *later = self.unwritten
        last = [text for text in later[-1:] if text.startswith(_WEIGHTS)]
        more = len(later) - len(last)
        texts = [first, *([f"and {more} later ones"] if more else []), *last]
        return [f"not written: {'; '.join(texts)}"]

    def _not_written(self, what: str, error: OSError) -> None:
        text = f"{what}: {error.filename or self.checkpoints.folder}: {error.strerror}"
        if self._leads and not self.unwritten:
            print(f"warning: not written: {text}; training goes on", file=sys.stderr)
        self.unwritten.append(text)

    @property
    def _leads(self) -> bool:
        return self.runtime.rank == 0

    def _is_due(self, position: Position, seconds: float) -> bool:
        """Return whether to save at ``position``, ``seconds`` after the last checkpoint."""
        steps, epochs, minutes = self.often.steps, self.often.epochs, self.often.minutes
        return (
            (steps is not None and position.steps_done % steps == 0)
            or (epochs is not None and not position.step and not position.epoch % epochs)
            or (minutes is not None and seconds >= 60 * minutes)
        )

    def _is_new_best(self, position: Position) -> bool:
        """Whether the epoch that has just ended is better than every other."""
        history = position.history
        return (
            position.step == 0
            and bool(history)
            and not any(is_best([history[-1], other], self.measure) for other in history[:-1])
        )

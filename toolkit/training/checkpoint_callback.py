"""What keeps a run: its checkpoints, its end by a signal, and an eye on its loss."""

import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from toolkit.errors import UserError
from toolkit.metric import Metric
from toolkit.runtime.base import Runtime
from toolkit.training.checkpoint import serialised, write_bytes
from toolkit.training.checkpoints import Checkpoints
from toolkit.training.loop import DivergedError, Epoch, Position, Stretches, is_best

GUARDS = ("off", "stop", "rollback")
_WEIGHTS = "the weights"
_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PAUSE = 5.0  # seconds between two pauses at which ranks hear of signals
# Seconds in which a repeated signal counts as the same one: torchrun passes to its ranks what Slurm
# sends to every process.
ECHO = 2.0


class StoppedError(Exception):
    """A signal has ended the run, after a checkpoint if it saves any."""

    def __init__(self, number: int, *, saved: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.saved = saved


@dataclass(frozen=True)
class SaveIntervals:
    """When checkpoints are saved; None: not for that reason.

    Args:
        steps: training steps from one to the next.
        epochs: epochs from one to the next.
        minutes: time from one to the next.

    Raises:
        UserError: an interval that is not above 0.
    """

    steps: int | None = None
    epochs: int | None = 1
    minutes: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise UserError(f"save.{name} is above 0, or null: got {value}")

    @property
    def never(self) -> bool:
        return self.steps is None and self.epochs is None and self.minutes is None


@dataclass
class Signals:
    """SIGTERM, SIGINT and SIGHUP, remembered until the run can pause; a second ends it at once.

    Attributes:
        number: of the one that this process has heard; 0 if none.
        agreed: of one that all ranks know of.
        at: when it was heard, in seconds.
    """

    number: int = 0
    agreed: int = 0
    at: float = 0.0

    @contextmanager
    def heard(self) -> Iterator["Signals"]:
        """Hear them, but for SIGHUP under nohup; only the main thread hears any."""
        deaf = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
        try:
            before = {n: signal.signal(n, self._hear) for n in _HEARD if n not in deaf}
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
        runtime: that trains.
        saves: whether checkpoints are saved.
        checkpoints: where they are.
        often: when they are saved.
        extra: what a checkpoint holds beside the runtime's state and the position.
        guard: ``off``, or to raise :class:`DivergedError` where the loss is not finite or, in
            training, more than ``guard_factor`` times that of the first step.
        guard_factor: see ``guard``.
        signals: that end the run.
        measure: by which a checkpoint is the best.
        epochs: of the run, which no signal stops once they are done.
        weights: whether the best checkpoint, and the weights that training ends with, are kept.
        length: training steps of the first stretch; later ones are longer or shorter, to take some
            seconds.

    Attributes:
        unwritten: what could not be written.
    """

    runtime: Runtime
    saves: bool
    checkpoints: Checkpoints
    often: SaveIntervals
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
        self._begun = time.monotonic()
        every = self.often.steps
        if every is None:
            return self.length
        return min(self.length, every - position.steps_done % every)

    def check(self, position: Position) -> None:
        loss = position.stretch_loss
        if self.guard == "off":
            return
        if not isfinite(loss) or loss > self.guard_factor * position.first_loss:
            before = f" and was {position.first_loss:.4g} at first" if isfinite(loss) else ""
            raise DivergedError(
                f"the training loss of epoch {position.epoch}, step {position.step} is"
                f" {loss:.4g}{before}",
                position.history,
            )

    def check_test(self, loss: float, position: Position) -> None:
        if self.guard != "off" and not isfinite(loss):
            told = f"the test loss of epoch {position.epoch} is {loss}"
            raise DivergedError(told, position.history)

    def end(self, position: Position) -> None:
        trained = time.monotonic() - self._begun
        mine = [0.0, 0.0, *(float(self.signals.number == number) for number in _HEARD)]
        if self._leads:
            mine[:2] = [time.monotonic() - self._saved_at, trained]
        total = self.runtime.total(torch.tensor(mine, dtype=torch.float64)).tolist()
        since, trained, *by = total
        heard = [number for number, ranks in zip(_HEARD, by, strict=True) if ranks]
        due = self._due(position, since)
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
        """Write a checkpoint; a run goes on where it cannot be written, which is False."""
        rest = {"position": position.state_dict(), **self.extra}
        self._saved_at = time.monotonic()
        history = position.history
        new = position.step == 0 and bool(history)
        best = self.weights and new and is_best(history, self.measure)
        try:
            self.checkpoints.save(self.runtime, rest, position.steps_done, best=best)
        except OSError as error:
            self._not_written(f"the checkpoint of step {position.steps_done}", error)
            return False
        return True

    def write_model(self) -> None:
        """Write the weights that training ended with, for any program that has the model."""
        if not (self.saves and self.weights):
            return
        model = self.runtime.module()
        if not self._leads:
            return
        path = self.checkpoints.folder.parent / "model.pt"
        try:
            write_bytes(
                path, serialised(tree_map_only(torch.Tensor, torch.Tensor.cpu, model.state_dict()))
            )
        except OSError as error:
            self._not_written(f"{_WEIGHTS}, {path}", error)

    def notes(self) -> list[str]:
        """A sentence on what could not be written, if anything."""
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

    def _due(self, position: Position, since: float) -> bool:
        often = self.often
        of_epochs = often.epochs is not None and position.step == 0
        return (
            (often.steps is not None and position.steps_done % often.steps == 0)
            or (of_epochs and position.epoch % (often.epochs or 1) == 0)
            or (often.minutes is not None and since >= 60 * often.minutes)
            or (self.weights and position.step == 0 and self._never_so_good(position.history))
        )

    def _never_so_good(self, history: Sequence[Epoch]) -> bool:
        """Whether the last epoch, and no other, is the best."""
        return bool(history) and not any(
            is_best([history[-1], other], self.measure) for other in history[:-1]
        )

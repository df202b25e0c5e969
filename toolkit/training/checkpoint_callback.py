"""Save checkpoints and stop at signals, at the pauses of the training loop."""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch.utils._pytree import tree_map_only

from toolkit.terminal import show
from toolkit.training.checkpoint import Checkpoints, write
from toolkit.training.loop import LoopCallback, Position, is_best
from toolkit.training.option_changes import options_to_save
from toolkit.training.stop_signals import SIGNALS, Signals, StoppedError
from toolkit.training.training_run import TrainingRun

_PAUSE = 5.0  # seconds between two pauses
_FIRST_STEPS = 8  # before the first pause; measured steps are not cut up


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
        self.saved_options = options_to_save(run)
        self.unwritten: list[str] = []
        # Steps to the next pause: doubled or halved at each, until they take about _PAUSE seconds.
        self.n_steps = max(_FIRST_STEPS, getattr(run.runtime, "record", 0))
        self._begun = time.monotonic()
        self._saved_at = self._begun

    def steps(self, position: Position, n_steps: int) -> int:
        """Return the steps until the next pause, which is where a checkpoint is due if any is."""
        self._begun = time.monotonic()
        save_steps = self.run.options.save.steps
        if not save_steps:
            return self.n_steps
        # At most up to the next multiple of save.steps.
        return min(self.n_steps, save_steps - position.steps_done % save_steps)

    def end(self, position: Position) -> None:
        """Exchange received signals with all ranks, save if due, and set the steps to the next.

        Raises:
            StoppedError: a rank received a signal before the last epoch ended.
        """
        now = time.monotonic()
        own_values = [0.0, 0.0]
        # All ranks must decide the same: only rank 0's clock counts, and a signal to any rank.
        if self.runtime.rank == 0:
            own_values = [now - self._saved_at, now - self._begun]
        # What the ranks sum, and so what each entry of the total is::
        #
        #     [seconds since the last save, seconds since the last pause,   of rank 0
        #      ranks with SIGINT, with SIGTERM, with SIGHUP]
        own_values += [float(self.signals.number == number) for number in SIGNALS]
        # One exchange for all values: each costs a round of messages.
        total = self.runtime.total(
            torch.tensor(own_values, dtype=torch.float64)
        ).tolist()
        seconds_since_save, seconds_trained, *n_ranks_of_signal = total
        heard_signals = [
            number
            for number, n_ranks in zip(SIGNALS, n_ranks_of_signal, strict=True)
            if n_ranks
        ]

        written = False
        if self.saves and (heard_signals or self._is_due(position, seconds_since_save)):
            written = self.save(position)
        if heard_signals:
            self.signals.agreed = heard_signals[0]
            # After the last epoch there is nothing left to stop.
            if position.epoch < self.run.options.epochs:
                raise StoppedError(heard_signals[0], saved=written)

        # Pauses come about every _PAUSE seconds, whatever a step takes.
        if seconds_trained < _PAUSE / 2:
            self.n_steps *= 2
        elif seconds_trained > _PAUSE and self.n_steps > 1:
            self.n_steps //= 2

    def _is_due(self, position: Position, seconds_since_save: float) -> bool:
        """Return whether a checkpoint is due at this pause."""
        save = self.run.options.save
        epoch_ended = position.step == 0
        return (
            (save.steps is not None and position.steps_done % save.steps == 0)
            or (
                save.epochs is not None
                and epoch_ended
                and position.epoch % save.epochs == 0
            )
            or (save.minutes is not None and seconds_since_save >= 60 * save.minutes)
            or self._is_best(position)
        )

    def save(self, position: Position) -> bool:
        """Write a checkpoint; return False, and let the run continue, if it cannot be written."""
        # Set even if the write fails, so that save.minutes does not try again at every pause.
        self._saved_at = time.monotonic()
        # As text: what a damaged checkpoint holds here is then read whole, or not at all.
        run_state = {
            "run": json.dumps(
                {"position": asdict(position), "options": self.saved_options}
            )
        }
        try:
            self.checkpoints.save(
                self.runtime,
                run_state,
                position.steps_done,
                best=self._is_best(position),
            )
        except OSError as error:
            self._not_written(f"the checkpoint of step {position.steps_done}", error)
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
            if self.runtime.writes:
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
        return [
            f"not written ({len(self.unwritten)} in all): {'; '.join(first_and_last)}"
        ]

    def _not_written(self, content: str, error: OSError) -> None:
        """Note a failed write, and print the first one on rank 0."""
        text = (
            f"{content}: {error.filename or self.checkpoints.folder}: {error.strerror}"
        )
        if self.runtime.writes and not self.unwritten:
            show(f"warning: not written: {text}; training continues", sys.stderr)
        self.unwritten.append(text)

    def _is_best(self, position: Position) -> bool:
        """Return whether an epoch has just ended whose weights are to be kept as the best."""
        epoch_ended = self.weights and position.history and not position.step
        return bool(epoch_ended) and is_best(
            position.history, self.run.samples.form.metric
        )

"""A bar that shows how far training is, how fast, and its mean loss of the epoch so far."""

import shutil
import sys
import time
from typing import TYPE_CHECKING, Protocol, Self

from tqdm.auto import tqdm

from toolkit.terminal import fitted

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.training import Step


_FULL_WIDTH = 120  # columns that a bar with all its figures takes, about
_FULL = "{l_bar}{bar}| {n:.1f}/{total} epochs [{elapsed}<{remaining}{postfix}]"
_NARROW = "{desc}: {n:.1f}/{total} epochs |{bar}| <{remaining}{postfix}"


class RunProgress(Protocol):
    """Shows how far one run after another is."""

    def run(self, name: str) -> None:
        """Begin a run."""

    def trained(self, step: "Step") -> None:
        """Show a training step."""

    def ended(self, n_epochs: int) -> None:
        """End a run of ``n_epochs``."""

    def note(self, text: str) -> None:
        """Show a short text."""


class _EpochBar:
    """A bar over epochs, closed at the end of its context."""

    def __init__(self, n_epochs: int, *, visible: bool, interval: float) -> None:
        self._is_narrow = _terminal_is_narrow()
        self._bar = tqdm(
            total=n_epochs,
            disable=not visible,
            bar_format=_NARROW if self._is_narrow else _FULL,
            mininterval=interval,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        # An unused bar would hide the error.
        self._bar.leave = error is None or self._bar.n > 0
        self._bar.close()


class Progress(_EpochBar):
    """A bar over the epochs of one or several runs, which moves with each training step.

    Args:
        n_epochs: epochs of all runs together.
        visible: whether this process shows the bar.
        interval: seconds between two refreshes; by default 0.2 on a terminal and 10 elsewhere.
    """

    def __init__(
        self, n_epochs: int, *, visible: bool = True, interval: float | None = None
    ) -> None:
        if interval is None:
            interval = _interval()
        self._interval = interval
        self._refreshed = time.monotonic()
        self._earlier_epochs = 0  # of the runs before this one
        self._new_run = True
        self._epoch_start = 0.0  # by time.monotonic
        self._epoch_samples = 0
        self._losses: list[Tensor] = []  # of the epoch so far
        self._figures = self._note = ""
        super().__init__(n_epochs, visible=visible, interval=interval)

    def run(self, name: str) -> None:
        """Begin a run."""
        self._new_run = True
        self._bar.set_description_str(name, refresh=False)

    def trained(self, step: "Step") -> None:
        """Show a training step; its loss only now and then, since reading waits for the device."""
        if self._bar.disable:
            return
        now = time.monotonic()
        epochs = (step.result.step + 1) / step.n_steps
        # Neither evaluation, compilation nor the steps before a resumption count as time of steps.
        if step.step == 1 or self._new_run:
            self._epoch_start = now
            self._epoch_samples = 0
        else:
            self._epoch_samples += step.samples
        if self._new_run:
            self._new_run = False
            # tqdm's rate counts from `initial` on, so without what was trained before.
            self._bar.initial += epochs - 1 / step.n_steps
        if step.step == 1:
            self._losses.clear()
        if len(step.result.losses):
            self._losses.append(step.result.losses)
        # Assigned, not added up: a run that is rolled back repeats steps, and the bar goes back
        # with it.
        self._bar.n = self._earlier_epochs + epochs
        is_due = now >= self._refreshed + self._interval
        # The end of an epoch reads its losses anyway.
        if is_due or step.step == step.n_steps:
            self._figures = self._figures_of(step.learning_rate, now)
            self.note(self._note)
        if is_due:
            self._refreshed = now
            self._bar.refresh()

    def _figures_of(self, learning_rate: float, now: float) -> str:
        """Return the loss, the learning rate and the speed; short ones on a narrow terminal."""
        figures = []
        if self._losses:
            label = "loss" if self._is_narrow else "train loss"
            figures.append(f"{label} {_mean(self._losses):.3f}")
        if not self._is_narrow:
            figures.append(f"lr {learning_rate:.3g}")
        if self._epoch_samples:
            rate = self._epoch_samples / (now - self._epoch_start)
            speed = f"{rate:.0f} samples/s"
            if self._is_narrow:
                speed = f"{tqdm.format_sizeof(rate)}/s"
            figures.append(speed)
        return ", ".join(figures)

    def ended(self, n_epochs: int) -> None:
        """End a run of ``n_epochs``; those that it did not train took no time."""
        self._earlier_epochs += n_epochs
        if not self._bar.disable:
            # What was not trained here must not count for the rate that tqdm estimates the rest by.
            self._bar.initial += self._earlier_epochs - self._bar.n
            self._bar.n = self._earlier_epochs

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(fitted(text, sys.stderr), file=sys.stderr)

    def note(self, text: str) -> None:
        """Show a short text in the bar: before the figures, or last on a narrow terminal."""
        self._note = text
        texts = [text, self._figures]
        if self._is_narrow:
            texts = [self._figures, text.removeprefix("last: ")]
        self._bar.set_postfix_str(", ".join(filter(None, texts)), refresh=False)


class ParallelProgress(_EpochBar):
    """A bar over the epochs of runs that train at the same time.

    Args:
        n_runs: number of runs.
        n_epochs: epochs of all runs together.
    """

    def __init__(self, n_runs: int, n_epochs: int) -> None:
        self._n_runs = n_runs
        self._runs_done = 0
        self._epochs: dict[tuple[str, int], float] = {}  # done, by run
        super().__init__(n_epochs, visible=True, interval=_interval())
        self._bar.set_description_str(f"0/{self._n_runs} runs")

    def trained(self, run: tuple[str, int], n_epochs: float) -> None:
        """Show that ``run`` has done ``n_epochs`` so far."""
        self._epochs[run] = n_epochs
        # Their sum, since increases that are added up may exceed the total by a rounding error.
        self._bar.n = sum(self._epochs.values())
        self._bar.update(0)

    def ended(self, run: tuple[str, int], n_epochs: float, note: str) -> None:
        """Show that ``run``, of ``n_epochs``, has ended, with a short text on it."""
        self._runs_done += 1
        self._bar.set_description_str(
            f"{self._runs_done}/{self._n_runs} runs", refresh=False
        )
        self._bar.set_postfix_str(note, refresh=False)
        self.trained(run, n_epochs)


def _terminal_is_narrow() -> bool:
    """Whether a terminal would cut the last figures; a file of output has long lines."""
    return sys.stderr.isatty() and shutil.get_terminal_size().columns < _FULL_WIDTH


def _interval() -> float:
    """Return the seconds between two refreshes: many on a terminal, few lines in a log file."""
    if sys.stderr.isatty():
        return 0.2
    return 10


def _mean(losses: "list[Tensor]") -> float:
    """Return the mean loss; reading it waits for the device."""
    import torch

    return float(torch.cat(losses).mean())

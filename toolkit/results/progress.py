"""A bar that shows how far training has come, and what it has come to."""

import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from tqdm import tqdm

from toolkit.results.speed import Speed

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.training import Step

_SMOOTHED = 50  # training steps whose mean loss is shown


class Progress:
    """A bar over epochs, counted in steps; on a terminal it moves, elsewhere it prints seldom.

    Args:
        n: epochs of all runs together, or number of other units.
        unit: name of the units that ``n`` counts.
        shown: whether this process shows the bar.
        interval: seconds between two refreshes; unless given, a moment on a terminal.
    """

    def __init__(
        self, n: int, *, unit: str = "epochs", shown: bool = True, interval: float | None = None
    ) -> None:
        self._epochs = self._before = 0  # of all runs, and of those before this one
        self._begins = True
        self._interval = (0.2 if sys.stderr.isatty() else 10) if interval is None else interval
        self._refreshed = time.monotonic()
        self._losses: deque[Tensor] = deque(maxlen=_SMOOTHED)
        self._speed = Speed()
        self._figures = self._note = ""
        self._bar = tqdm(
            total=n,
            disable=not shown,
            unit=f" {unit}",
            bar_format="{l_bar}{bar}| {n:.1f}/{total}{unit} [{elapsed}<{remaining}{postfix}]",
            mininterval=self._interval,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._bar.leave = error is None or self._bar.n > 0  # of what never began nothing stays
        self._bar.close()

    def run(self, name: str) -> None:
        """A new run begins."""
        self._losses.clear()
        self._before, self._begins = self._epochs, True
        self._bar.set_description_str(name, refresh=False)

    def step(self, step: int, n_steps: int) -> None:
        """``step`` of the epoch's ``n_steps`` steps are done."""
        self._bar.update(self._epochs + step / n_steps - self._bar.n)
        if step == n_steps:
            self._epochs += 1

    def trained(self, step: "Step") -> None:
        """A training step is done. Its loss is read, which waits for the device, when it shows."""
        if self._bar.disable:
            return
        now = time.monotonic()
        if len(step.result.losses):
            self._losses.append(step.result.losses)
        if self._begins:  # a run that is resumed has been trained before, and not now
            trained = (step.result.step + 1) // step.n_steps - step.step // step.n_steps
            self._epochs, self._begins = self._before + trained, False
            self._bar.initial += trained + (step.step - 1) / step.n_steps
        self._speed.trained(step, now)
        self._bar.n = self._epochs + step.step / step.n_steps
        if step.step == step.n_steps:
            self._epochs += 1
        due = now >= self._refreshed + self._interval
        if due or step.step == step.n_steps:  # at the end of an epoch its loss is read anyway
            self._show(step)
        if due:
            self._refreshed = now
            self._bar.refresh()

    def ended(self, n: int) -> None:
        """The run has ended, and counts as ``n`` epochs; those that it lacks took no time."""
        self._epochs = self._before + n
        if self._bar.disable:
            return
        self._bar.initial += self._epochs - self._bar.n
        self._bar.n = self._epochs

    def line(self, text: str) -> None:
        """A line by itself, above the bar."""
        self._bar.write(text, file=sys.stderr)

    def note(self, text: str) -> None:
        """Something short to show at the end of the bar."""
        self._note = text
        self._set_end()

    def _show(self, step: "Step") -> None:
        shown = [f"lr {step.learning_rate:.3g}"]
        if self._losses:
            shown.insert(0, f"loss {_mean(self._losses):.3f}")
        if rate := self._speed.rate(time.monotonic()):
            shown.insert(0, f"{rate:.0f} samples/s")
        self._figures = ", ".join(shown)
        self._set_end()

    def _set_end(self) -> None:
        text = ", ".join(filter(None, [self._figures, self._note]))
        self._bar.set_postfix_str(text, refresh=False)


def _mean(losses: "deque[Tensor]") -> float:
    import torch

    return float(torch.cat(list(losses)).mean())

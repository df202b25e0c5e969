"""A bar that shows how far training has come, and what it has come to."""

import sys
from types import TracebackType

from tqdm import tqdm


class Progress:
    """A bar over epochs, counted in steps; on a terminal it moves, elsewhere it prints seldom.

    Args:
        n: epochs of all runs together, or what else is done in steps.
        unit: of ``n``.
        shown: whether this process is the one that shows it.
    """

    def __init__(self, n: int, *, unit: str = "epochs", shown: bool = True) -> None:
        self._epochs = 0
        self._bar = tqdm(
            total=n,
            disable=not shown,
            unit=f" {unit}",
            bar_format="{l_bar}{bar}| {n:.1f}/{total}{unit} [{elapsed}<{remaining}{postfix}]",
            mininterval=0.2 if sys.stderr.isatty() else 10,
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def run(self, name: str) -> None:
        """A new run begins."""
        self._bar.set_description_str(name, refresh=False)

    def step(self, step: int, n_steps: int) -> None:
        """``step`` of the epoch's ``n_steps`` steps are done."""
        self._bar.update(self._epochs + step / n_steps - self._bar.n)
        if step == n_steps:
            self._epochs += 1

    def note(self, text: str) -> None:
        """Something short to show at the end of the bar."""
        self._bar.set_postfix_str(text, refresh=False)

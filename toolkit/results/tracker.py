"""What an experiment tells of its run, and to whom: to nobody, unless it is tracked."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from toolkit.errors import first_line
from toolkit.results.provenance import redacted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_said: set[str] = set()


class Tracker:
    """Tracks nothing.

    Attributes:
        on: whether anything is done with what is logged.
        epochs: those that have been logged, also before the run was resumed.
        notes: sentences on what went wrong.
        where: how to come to the run, once it has ended.
    """

    on = False

    def __init__(self) -> None:
        self.epochs: set[int] = set()
        self.notes: list[str] = []
        self.where = ""

    def log(self, values: Mapping[str, Any], step: int) -> None:
        """Numbers at a training step of the run."""

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows, all with the same columns."""

    def figure(self, name: str, figure: "Figure") -> None:
        """A figure, as an image."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """What came of the run."""

    def files(self, name: str, paths: Sequence[Path]) -> None:
        """Files to keep beside the run."""

    def end(self, state: str, status: int) -> None:
        """How the run has ended, and the exit status; the first word counts."""

    def close(self) -> None:
        """Nothing more will come."""

    def note(self, text: str) -> None:
        """Something went wrong: remember it, and say it once in a process."""
        self.notes.append(text)
        if text not in _said:
            _said.add(text)
            tqdm.write(f"warning: {text}", file=sys.stderr)


def one_line(error: BaseException) -> str:
    """What went wrong, in a line."""
    return str(redacted(first_line(error)))

"""What a folder keeps of its run in W&B: who it is, and the points that were logged.

A resumed run goes on as the same one. W&B's offline files can not be gone on with, so a new one is
begun, with the points that came before the step at which the run is resumed.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from toolkit.files import write_text

JOURNAL = "tracked.jsonl"
"""The file in a run's folder; its first line has the run's id and group."""

Point = dict[str, Any]


class Journal:
    """The journal of one run.

    Args:
        path: where it is kept; None: nowhere.
        alone: whether nothing else is tracked in the run's folder.
        resume: whether to go on with the one that is at ``path``, if there is one.

    Attributes:
        id: of the run in W&B.
        found: whether there was one to go on with.
        mode: in which it was tracked; None for a run that begins.
        group: in which it was.
        points: that were logged before it was resumed.
        alone: as given.
    """

    def __init__(self, path: Path | None, *, alone: bool = True, resume: bool) -> None:
        self.id = uuid4().hex[:8]
        self.found = False
        self.mode: str | None = None
        self.group: str | None = None
        self.points: list[Point] = []
        self.alone = alone
        self._path = path
        self._file: TextIO | None = None
        if path is not None and resume:
            self._read(path)

    def begin(self, mode: str, group: str | None, before: int | None = None) -> None:
        """Write what is known; points at the training step ``before`` and later ones are let go.

        Raises:
            OSError: it cannot be written.
        """
        self.mode, self.group = mode, group
        if before is not None:
            self.points = [point for point in self.points if point["step"] < before]
        if self._path is None:
            return
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        head = {"id": self.id, "mode": mode, "group": group}
        write_text(self._path, "".join(f"{json.dumps(line)}\n" for line in [head, *self.points]))
        self._file = self._path.open("a", buffering=1)

    def add(self, point: Mapping[str, Any]) -> None:
        """A point has been logged.

        Raises:
            OSError: it cannot be written.
        """
        if self._file is not None:
            self._file.write(f"{json.dumps(point)}\n")

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _read(self, path: Path) -> None:
        try:
            head, *rest = path.read_text().splitlines()
            found = json.loads(head)
            self.id, self.mode, self.group = found["id"], found["mode"], found["group"]
            self.found = True
        except (OSError, ValueError, KeyError, TypeError):
            return
        for line in rest:
            with suppress(ValueError):  # the last line of a process that was killed
                point = json.loads(line)
                if isinstance(point, dict) and isinstance(point.get("step"), int):
                    self.points.append(point)

"""The journal of a run in W&B, kept in the run's folder: its id, and the points that it has logged.

A run that is resumed keeps its id. W&B cannot append to an offline file, so the resumed run begins
a new one, and logs there once more the points from before the training step at which it goes on.
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
        path: of the file; None: the journal is not kept.
        alone: whether nothing else is tracked in the run's folder.
        resume: whether to go on with the journal at ``path``, if there is one.

    Attributes:
        id: the run's in W&B: the one in the journal that was found, or a new one.
        found: whether there was a journal to go on with.
        mode: ``online`` or ``offline``, as the run was tracked; None where it has not begun.
        group: the run's in W&B, if it has one.
        points: logged before the run was resumed; :meth:`begin` lets go of those that come again.
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
        """Write the journal anew, and keep it open for more points.

        Args:
            mode: ``online`` or ``offline``.
            group: the run's in W&B.
            before: the training step at which the run goes on: points at it and at later ones are
                let go; None: all stay.

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
        """Add a point that has been logged.

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

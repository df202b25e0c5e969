"""A table on disk that grows while a run goes on."""

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.files import write_csv

Row = dict[str, Any]


class Ledger:
    """Rows of numbers in a CSV file, as soon as there are any.

    What a resumed run, or one that is rolled back, does again takes the place of what it did
    before. Where the file cannot be written, the rows are kept in memory.

    Args:
        path: of the file.
        keys: columns of whole numbers that tell rows apart, by which they are in order.
        resume: go on with the rows that the file has.
        here: whether this process writes.
    """

    def __init__(
        self, path: Path, keys: Sequence[str], *, resume: bool = False, here: bool = True
    ) -> None:
        self.path, self.keys, self.here = path, tuple(keys), here
        self._rows: dict[tuple[int, ...], Row] = {}
        self._columns: dict[str, None] = {}  # in order
        self._whole = False  # whether the file has these rows
        if resume:
            self._take(_read(path))

    def rows(self) -> list[Row]:
        """All of them, in order."""
        return [self._rows[key] for key in sorted(self._rows)]

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Take in rows; they may lack columns, and have some of their own."""
        known, columns = len(self._rows), len(self._columns)
        self._take(rows)
        if not rows or not self.here:
            return
        try:
            appended = (len(self._rows), len(self._columns)) == (known + len(rows), columns)
            if self._whole and appended:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            else:
                whole = [{name: row.get(name) for name in self._columns} for row in self.rows()]
                write_csv(self.path, whole)
            self._whole = True
        except OSError:
            self._whole = False

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._rows[tuple(row[key] for key in self.keys)] = dict(row)
            self._columns |= dict.fromkeys(row)


def _read(path: Path) -> list[Row]:
    """The rows of numbers, but for those that cannot be read, as one that is half written."""
    found: list[Row] = []
    with suppress(OSError, ValueError), path.open(newline="") as file:
        for row in csv.DictReader(file):
            with suppress(ValueError):
                found.append({name: _number(text) for name, text in row.items()})
    return found


def _number(text: str | list[str] | None) -> float | None:
    """
    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str):
        raise UserError("the row has too few cells, or too many")
    if not text:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)

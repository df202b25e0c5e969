"""Tables of numbers on disk: read whole, or written row by row while a run trains."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.files import write_csv
from toolkit.results.record import DamagedError

Row = dict[str, Any]


class Ledger:
    """Rows of numbers, each written to a CSV file as soon as it is known.

    A row replaces the one with the same keys: a run that is resumed or rolled back repeats steps.
    While the file cannot be written, rows stay in memory.

    Args:
        path: the file.
        keys: columns of whole numbers that identify and order the rows.
        resume: start with the rows of the file.
        here: whether this process writes.
    """

    def __init__(
        self, path: Path, keys: Sequence[str], *, resume: bool = False, here: bool = True
    ) -> None:
        self.path, self.keys, self.here = path, tuple(keys), here
        self._rows: dict[tuple[int, ...], Row] = {}
        self._columns: dict[str, None] = {}  # in order
        self._on_disk = False  # whether the file has all rows
        if resume:
            self._take(read_csv(path, skip_damaged=True))

    def rows(self) -> list[Row]:
        """Return all rows, in the order of their keys."""
        return [self._rows[key] for key in sorted(self._rows)]

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, which may have more or fewer columns than those before."""
        n_known, n_columns = len(self._rows), len(self._columns)
        self._take(rows)
        if not rows or not self.here:
            return
        is_new = (len(self._rows), len(self._columns)) == (n_known + len(rows), n_columns)
        try:
            if self._on_disk and is_new:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            else:
                write_csv(self.path, [{k: r.get(k) for k in self._columns} for r in self.rows()])
            self._on_disk = True
        except OSError:
            self._on_disk = False

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._rows[tuple(row[key] for key in self.keys)] = dict(row)
            self._columns |= dict.fromkeys(row)


def read_csv(path: Path, words: Sequence[str] = (), *, skip_damaged: bool = False) -> list[Row]:
    """Read the rows of a table of numbers; none if there is no file.

    Args:
        path: the file.
        words: columns of text. Other cells are int, float, or None if they are empty.
        skip_damaged: leave out rows that cannot be read, such as one half written by a process
            that was killed.

    Raises:
        DamagedError: it cannot be read, or a cell is not a number.
    """
    rows: list[Row] = []
    if not path.exists():
        return rows
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file, strict=True)
            names = reader.fieldnames or []
            if not names:
                raise UserError("it is empty")
            for row in reader:
                try:
                    if None in row or None in row.values():
                        raise UserError(f"line {reader.line_num} does not have {len(names)} cells")
                    rows.append({k: v if k in words else _number(v) for k, v in row.items()})
                except ValueError:
                    if not skip_damaged:
                        raise
    except (OSError, ValueError, csv.Error) as error:
        if not skip_damaged:
            raise DamagedError(f"{path.name} cannot be read: {first_line(error)}") from error
    return rows


def _number(text: str) -> float | None:
    if not text:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)

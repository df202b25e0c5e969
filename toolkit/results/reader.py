"""Files and values that may be damaged, or of another version."""

import csv
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line

Numbers = dict[str, float]

LARGEST = 2**63
"""What a table's whole numbers stay below."""
_SHARES = ("top1", "top5", "ema_top1")  # written as shares, given in per cent


class DamagedError(UserError):
    """A file of a run that cannot be read."""


def read_json(path: Path) -> dict[str, Any]:
    """An object of JSON.

    Raises:
        DamagedError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path.name} is not a JSON object")
    return content


def read_yaml(path: Path) -> Any:
    """What a YAML file holds; None where it cannot be read."""
    import yaml

    try:
        return yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


def read_csv(path: Path, words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of numbers, but for the columns ``words``; an empty cell is NaN. No file, no rows.

    Raises:
        DamagedError: it cannot be read, or a cell is no number.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            rows = list(csv.reader(file, strict=True))
        if not rows:
            raise UserError("it is empty")
        names, found = rows[0], []
        for line, row in enumerate(rows[1:], start=2):
            if len(row) != len(names):
                raise UserError(f"line {line} has {len(row)} cells of {len(names)}")
            cells = zip(names, row, strict=True)
            found.append({name: cell if name in words else _number(cell) for name, cell in cells})
        return found
    except (OSError, ValueError, csv.Error) as error:
        raise DamagedError(f"{path.name} cannot be read: {first_line(error)}") from error


def _number(cell: str) -> float:
    return float(cell) if cell else nan


def number_rows(rows: Any) -> list[Numbers]:
    """:func:`numbers_of` each of the :func:`mappings`."""
    return [numbers_of(row) for row in mappings(rows)]


def mappings(rows: Any) -> list[dict[str, Any]]:
    """Those of ``rows`` that are mappings; none if ``rows`` is no list."""
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def numbers_of(row: Mapping[str, Any]) -> Numbers:
    """The numbers of a row; null is NaN."""
    found = {}
    for name, value in row.items():
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            with suppress(OverflowError):
                found[str(name)] = nan if value is None else float(value)
    return found


def per_cent(row: Numbers) -> Numbers:
    """``row`` with its accuracies in per cent."""
    return {name: 100 * value if name in _SHARES else value for name, value in row.items()}


def whole_number(value: Any) -> int | None:
    """``value`` if it is an int that a table can hold, and no bool; else None."""
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return value if whole else None


def text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None

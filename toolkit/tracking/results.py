"""Results on disk: ``result.json`` and tables as CSV, whole or not at all."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

Rows = Sequence[Mapping[str, Any]]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write beside, then rename, so that a reader never finds half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(content, indent=2, default=str) + "\n")
    beside.replace(path)


def write_csv(path: Path, rows: Rows) -> None:
    """One line a row, the columns those of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(rows: Rows) -> str:
    """Rows as aligned text, their keys as headings."""
    return tabulate([list(row.values()) for row in rows], headers=list(rows[0]), numalign="right")

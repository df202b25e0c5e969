"""Files of results: ``result.json``, the record of an experiment, and tables of numbers.

| field of result.json | content |
|---|---|
| schema | 1, also if it is missing |
| metrics | of a training, the last epoch's metrics by name; of other experiments, rows |
| provenance | command, config, commit, versions, device, seed, started, seconds |
| schedule | name; of a training |
| judged_by | accuracy or loss; of trainings and comparisons |
| notes | sentences on what went wrong |
| delays | rows of delay diagnostics, a row per stage |
| ranks | rows of measurements, a row per rank |
| step_seconds | measured and predicted, of the training steps that were measured |

Metrics and provenance are required, experiments may add other fields, and NaN is null.
"""

import csv
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.files import check_regular, read_plain, write_csv, write_json
from toolkit.metric import ACCURACY, LOSS
from toolkit.results.provenance import provenance

SCHEMA = 1
RESULT = "result.json"
METRICS = {metric.name: metric for metric in (ACCURACY, LOSS)}

PlainRow = dict[str, Any]
Numbers = dict[str, float]

_SHARES = {"top1", "top5", "ema_top1", "published_top1"}


class DamagedError(UserError):
    """A file of a run that cannot be read."""


def write_result(
    folder: Path,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    device: str,
    seconds: float,
    **more: Any,
) -> PlainRow:
    """Write ``rows`` to ``folder/name.csv``, and with their provenance to ``folder/result.json``.

    Args:
        folder: output folder of the experiment.
        name: name of the table.
        rows: the metrics, all with the same keys.
        config: options of the experiment.
        device: the device in words.
        seconds: wall time.
        more: other fields of the result.

    Returns:
        the content of ``result.json``.
    """
    source = provenance(config, device, seconds)
    result = {"schema": SCHEMA, "metrics": rows, **more, "provenance": source}
    write_csv(folder / f"{name}.csv", rows)
    write_json(folder / RESULT, result)
    return result


def read_result(folder: Path) -> PlainRow:
    """Read and check ``folder/result.json``; raise DamagedError if it does not match the schema."""
    # Fields that older versions did not write get their defaults, so that old results stay
    # readable.
    defaults = {"schema": SCHEMA, "schedule": "", "judged_by": None}
    result = (
        defaults | {"notes": [], "delays": [], "ranks": []} | read_json(folder / RESULT)
    )
    metrics = result.get("metrics")
    is_valid = {
        "schema": result["schema"] == SCHEMA,
        "metrics": isinstance(metrics, dict) or _is_list(metrics, dict),
        "provenance": isinstance(result.get("provenance"), dict),
        "schedule": isinstance(result["schedule"], str),
        "judged_by": result["judged_by"] in [None, *METRICS],
        "notes": _is_list(result["notes"], str),
        "delays": _is_list(result["delays"], dict),
        "ranks": _is_list(result["ranks"], dict),
    }
    for name in is_valid:
        if not is_valid[name]:
            value_text = str(result.get(name))[:40]
            raise DamagedError(
                f"{RESULT}: {name} does not match schema {SCHEMA}: got {value_text}"
            )
    return result


def _is_list(value: object, item_type: type) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, item_type) for item in value
    )


def read_json(path: Path) -> PlainRow:
    """Read a JSON object; raise DamagedError if it cannot be read, or is not an object."""
    try:
        content = read_plain(path)
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"{path.name} cannot be read: {first_line(error)}"
        ) from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path.name} is not a JSON object")
    return content


def read_yaml(path: Path) -> PlainRow:
    """Read a YAML mapping; empty if it cannot be read."""
    try:
        content = read_plain(path)
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content


def read_csv(
    path: Path, words: Sequence[str] = (), *, skip_damaged: bool = False
) -> list[PlainRow]:
    """Read the rows of a table of numbers; none if there is no file.

    Cells are int, float, or None if they are empty; in the columns ``words`` they are text. Other
    cells raise DamagedError, unless rows that a killed process wrote in part are skipped.
    """
    rows: list[PlainRow] = []
    if not path.exists():
        return rows
    try:
        # In this order: a pipe without a writer would block in open().
        check_regular(path)
        with path.open(newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                try:
                    # csv.DictReader puts surplus cells under None, and None into cells that are
                    # missing.
                    if None in row or None in row.values():
                        raise UserError(
                            f"line {reader.line_num} has too few or too many cells"
                        )
                    for column, cell in row.items():
                        if column not in words:
                            row[column] = _number(cell)
                    rows.append(row)
                # A row that a killed process wrote in part, or a cell that is no number.
                except ValueError:
                    if not skip_damaged:
                        raise
    except (OSError, ValueError, csv.Error) as error:
        if not skip_damaged:
            raise DamagedError(
                f"{path.name} cannot be read: {first_line(error)}"
            ) from error
    return rows


def _number(text: str) -> float | None:
    """Return a cell as int or float, or None if it is empty."""
    if not text:
        return None
    # Seeds and steps stay whole numbers, since they are keys of rows and of runs.
    if text.lstrip("-").isdecimal():
        return int(text)
    return float(text)


def numbers_of(row: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a row, with None as NaN."""
    # A flag is no number, though bool is a kind of int in Python. Texts are left out as well.
    numbers = {}
    for name, value in row.items():
        if value is None:
            numbers[name] = nan
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name] = float(value)
    return numbers


def per_cent(row: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a row, with accuracies in per cent instead of shares."""
    numbers = numbers_of(row)
    for name in numbers.keys() & _SHARES:
        numbers[name] *= 100
    return numbers


class Ledger:
    """Rows of numbers, each written to a CSV file as soon as it is known.

    A row replaces the one with the same keys: a run that is resumed or rolled back repeats steps.
    While the file cannot be written, rows stay in memory.

    Args:
        path: the file, whose rows are there at the start if ``resume`` is true.
        keys: columns of whole numbers that identify and order the rows.
        writes: whether this process writes the file.
    """

    def __init__(
        self,
        path: Path,
        keys: Sequence[str],
        *,
        resume: bool = False,
        writes: bool = True,
    ) -> None:
        self.path = path
        self.keys = tuple(keys)
        self.writes = writes
        self._rows: dict[tuple[int, ...], PlainRow] = {}
        self._columns: dict[str, None] = {}  # in order
        self._on_disk = False  # whether the file has all rows
        # A killed process may have written half a row, which is left out.
        if resume:
            self._take(read_csv(path, skip_damaged=True))

    def rows(self) -> list[PlainRow]:
        """Return all rows, in the order of their keys."""
        return [self._rows[key] for key in sorted(self._rows)]

    def put(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows, which may have more or fewer columns than those before."""
        # If all rows are new and have no new column, they can be appended. Otherwise the file is
        # written as a whole, since a row replaces another or the heading changes.
        expected_size = len(self._rows) + len(rows), len(self._columns)
        self._take(rows)
        if not rows or not self.writes:
            return
        try:
            if self._on_disk and (len(self._rows), len(self._columns)) == expected_size:
                with self.path.open("a", newline="") as file:
                    csv.DictWriter(file, self._columns).writerows(rows)
            else:
                empty_row = dict.fromkeys(self._columns)
                write_csv(self.path, [empty_row | row for row in self.rows()])
            self._on_disk = True
        except OSError:
            self._on_disk = False

    def _take(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._rows[tuple(row[key] for key in self.keys)] = dict(row)
            self._columns |= dict.fromkeys(row)

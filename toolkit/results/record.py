"""Reader and writer of ``result.json``, the record of an experiment.

Its schema is version 1:

| field | content |
|---|---|
| schema | 1; a record without it is version 1, too |
| metrics | of a training, the last epoch's metrics by name; of other experiments, rows |
| provenance | command, config, commit, versions, device, seed, started, seconds |
| schedule | name; of a training |
| judged_by | accuracy or loss; of trainings and comparisons |
| notes | sentences on what went wrong |
| delays | rows of delay diagnostics, a row per stage |
| ranks | rows of measurements, a row per rank |

The first three are required, experiments may add others, and NaN is null.
"""

import json
from collections.abc import Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.files import write_csv, write_json
from toolkit.metric import ACCURACY, LOSS
from toolkit.results.provenance import provenance

SCHEMA = 1
RESULT = "result.json"
METRICS = {metric.name: metric for metric in (ACCURACY, LOSS)}

Numbers = dict[str, float]

_TYPES: dict[str, Any] = {
    "metrics": (dict, list),
    "provenance": dict,
    "schedule": str,
    "judged_by": str,
    "notes": list,
    "delays": list,
    "ranks": list,
}
_SHARES = ("top1", "top5", "ema_top1")


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
) -> dict[str, Any]:
    """Write ``rows`` to ``folder/name.csv``, and with their provenance to ``folder/result.json``.

    Args:
        folder: output folder of the experiment.
        name: name of the table.
        rows: the metrics, all with the same keys.
        config: of the experiment.
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


def read_result(folder: Path) -> dict[str, Any]:
    """Read and check ``folder/result.json``.

    Args:
        folder: output folder of an experiment.

    Returns:
        the fields of the schema, and the experiment's own.

    Raises:
        DamagedError: it cannot be read, or does not match the schema.
    """
    result = {"schema": SCHEMA, **read_json(folder / RESULT)}
    if result["schema"] != SCHEMA:
        raise DamagedError(f"{RESULT} has schema {result['schema']!r}; expected {SCHEMA}")
    for name in ("metrics", "provenance"):
        if name not in result:
            raise DamagedError(f"{RESULT} has no {name}")
    for name, types in _TYPES.items():
        value = result.get(name)
        if name in result and not isinstance(value, types):
            raise DamagedError(f"{RESULT}: {name} is of type {type(value).__name__}")
        items = str if name == "notes" else dict
        if isinstance(value, list) and not all(isinstance(item, items) for item in value):
            raise DamagedError(f"{RESULT}: {name} has an item that is no {items.__name__}")
    if (judge := result.get("judged_by", LOSS.name)) not in METRICS:
        raise DamagedError(f"{RESULT}: judged_by is {judge!r}")
    return result


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        DamagedError: it cannot be read, or is not an object.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(f"{path.name} cannot be read: {first_line(error)}") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path.name} is not a JSON object")
    return content


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; empty if it cannot be read."""
    import yaml

    try:
        content = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def numbers_of(row: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a row, with None as NaN."""
    return {
        name: nan if value is None else float(value)
        for name, value in row.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }


def per_cent(row: Mapping[str, Any]) -> Numbers:
    """Return the numbers of a row, with accuracies in per cent instead of shares."""
    return {k: 100 * v if k in _SHARES else v for k, v in numbers_of(row).items()}

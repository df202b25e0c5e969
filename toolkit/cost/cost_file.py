"""Costs of stages from a file of the user's: a profile of their own model, one row per stage."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.cost.stage_costs import StageCost
from toolkit.errors import UserError, first_line
from toolkit.files import check_regular, read_plain

COLUMNS: Mapping[str, str] = {
    "forward_ms": "milliseconds of a forward",
    "backward_inputs_ms": "milliseconds of a backward for gradients of inputs",
    "backward_weights_ms": "milliseconds of a backward for gradients of weights",
    "activation_mb": "MB that a micro-batch keeps for the backward",
    "output_mb": "MB that the stage sends on",
    "parameter_mb": "MB of trained parameters",
}
"""Columns of a file, and what they hold. MB are 10^6 bytes."""

_MB = 1e6


def read_costs(path: Path) -> tuple[StageCost, ...]:
    """Return the costs of stages from a CSV file, or a YAML file that is a list of mappings.

    Args:
        path: the file; its columns are those of :data:`COLUMNS`.

    Raises:
        UserError: it cannot be read, a column is missing or unknown, or a value is no number.
    """
    try:
        check_regular(path)
        if path.suffix == ".csv":
            rows: Any = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
        else:
            rows = read_plain(path)
    except OSError as error:
        raise UserError(f"costs={path} cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"costs={path} cannot be read: {first_line(error)}") from error
    if not isinstance(rows, list) or not rows:
        raise UserError(f"costs={path} has a row per stage: got none; columns {', '.join(COLUMNS)}")
    costs = []
    input_bytes = 0.0
    for stage, row in enumerate(rows):
        cost = _cost_of_row(row, f"costs={path}, stage {stage}", input_bytes)
        input_bytes = cost.output_bytes
        costs.append(cost)
    return tuple(costs)


def _cost_of_row(row: Any, place: str, input_bytes: float) -> StageCost:
    """Return the cost of a stage that receives ``input_bytes``."""
    if not isinstance(row, dict) or set(row) != {*COLUMNS}:
        columns = sorted(map(str, row)) if isinstance(row, dict) else row
        raise UserError(f"{place}: columns are {', '.join(COLUMNS)}: got {columns}")
    values = {}
    for name, value in row.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError):
            raise UserError(
                f"{place}: {name} is a number, {COLUMNS[name]}: got {value!r}"
            ) from None
    backward_ms = values["backward_inputs_ms"] + values["backward_weights_ms"]
    return StageCost(
        flops=0.0,
        backward_flops=0.0,
        activation_bytes=values["activation_mb"] * _MB,
        input_bytes=input_bytes,
        output_bytes=values["output_mb"] * _MB,
        parameter_bytes=values["parameter_mb"] * _MB,
        forward_seconds=values["forward_ms"] / 1e3,
        backward_seconds=backward_ms / 1e3,
        weight_share=values["backward_weights_ms"] / backward_ms if backward_ms else 0.0,
    )

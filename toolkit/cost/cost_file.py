"""Costs of stages from a file of the user's: a profile of their own model, one row per stage."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from toolkit.cost.stage_costs import Costs, StageCost, recomputing
from toolkit.cost.worker_forms import BUCKETS, Cut
from toolkit.errors import UserError, first_line
from toolkit.files import check_regular, read_plain
from toolkit.format import count
from toolkit.model.balance import balanced
from toolkit.model.partition import MEASURES, bucket_cuts

COLUMNS: Mapping[str, str] = {
    "forward_ms": "milliseconds of a forward",
    "backward_inputs_ms": "milliseconds of a backward for gradients of inputs",
    "backward_weights_ms": "milliseconds of a backward for gradients of weights",
    "activation_mb": "MB that a micro-batch keeps for the backward",
    "output_mb": "MB that the stage sends on",
    "parameter_mb": "MB of trained parameters",
}
"""Columns of a file, and what they hold. MB are 10^6 bytes."""
BATCH = "batch"
"""The column that may be left out: samples of the micro-batch that was measured, in every row."""

_MB = 1e6


@dataclass(frozen=True)
class FileCosts:
    """Rows of a file of costs, and the stages that consecutive rows make.

    Attributes:
        path: the file.
        rows: cost of each row.
        batch: samples of the micro-batch that was measured; None if the file does not say.
        checkpoint: stages that compute their forward twice, as for
            :func:`toolkit.cost.recomputing`.
    """

    path: Path
    rows: Costs = field(repr=False)
    batch: int | None = None
    checkpoint: str | Sequence[int] = "none"

    @property
    def in_words(self) -> str:
        """The file, its rows and the micro-batch they were measured with."""
        words = f"costs of {self.path}, {count(len(self.rows), 'row')}"
        if self.batch is not None:
            words += f" measured with micro-batches of {self.batch}"
        return words

    def __call__(self, n_stages: int, cut: Cut = MEASURES[0]) -> Costs:
        """Return the costs of ``n_stages``, each of one or more consecutive rows.

        Rows on one stage keep what they keep on their own, and send nothing to each other.

        Args:
            n_stages: at most as many as there are rows.
            cut: what stages share as equally as rows allow: ``flops`` (here the seconds, which a
                file has in their place), ``parameters`` or ``activations``; or
                :data:`~toolkit.cost.worker_forms.BUCKETS`, where ``n_stages`` is ignored.

        Raises:
            UserError: more stages than rows, or another cut.
        """
        if cut == BUCKETS:
            begins = bucket_cuts([cost.parameter_bytes for cost in self.rows])
            # A list of stages names those of the other cut: buckets have none.
            checkpoint = "all" if self.checkpoint == "all" else "none"
            return recomputing(self._merged(begins), checkpoint)
        if n_stages > len(self.rows):
            raise UserError(
                f"costs={self.path} has {count(len(self.rows), 'row')}, and the schedule has"
                f" {n_stages} stages: a stage is a row or more; give stages={len(self.rows)}"
            )
        if cut not in MEASURES:
            raise UserError(
                f"partition={cut} names modules, and costs={self.path} has rows: choose"
                f" {', '.join(MEASURES)}"
            )
        # Equal loads may be cut in several places. The cut over which less is sent then counts.
        across = [round(cost.output_bytes) for cost in self.rows[:-1]]
        costs = self._merged(balanced(self._loads(str(cut)), across, n_stages))
        return recomputing(costs, self.checkpoint)

    def check_batch(self, batch: int) -> None:
        """Raise UserError unless the rows were measured with micro-batches of ``batch`` samples."""
        if self.batch not in (None, batch):
            raise UserError(
                f"costs={self.path} were measured with micro-batches of {self.batch}: got"
                f" batch={batch}; give batch={self.batch}"
            )

    def _loads(self, measure: str) -> list[int]:
        """Return what stages share, of each row: nanoseconds or bytes."""
        if measure == "parameters":
            return [round(cost.parameter_bytes) for cost in self.rows]
        if measure == "activations":
            return [round(cost.activation_bytes) for cost in self.rows]
        return [round(sum(_seconds(cost)) * 1e9) for cost in self.rows]

    def _merged(self, begins: Sequence[int]) -> Costs:
        """Return a stage for the rows from each begin to the next; the first begins at 0."""
        ends = [0, *begins, len(self.rows)]
        return tuple(_merge(self.rows[begin:end]) for begin, end in pairwise(ends))


def _seconds(cost: StageCost) -> tuple[float, float]:
    """Return the measured seconds of a forward and a backward."""
    assert cost.forward_seconds is not None
    assert cost.backward_seconds is not None
    return cost.forward_seconds, cost.backward_seconds


def _merge(rows: Costs) -> StageCost:
    """Return the cost of a stage that runs ``rows`` one after another."""
    forwards, backwards = zip(*map(_seconds, rows), strict=True)
    weight_seconds = 0.0
    for cost, backward in zip(rows, backwards, strict=True):
        # A share is of seconds: those of the rows add, their shares do not.
        weight_seconds += (cost.weight_share or 0.0) * backward
    return StageCost(
        flops=0.0,
        backward_flops=0.0,
        activation_bytes=sum(cost.activation_bytes for cost in rows),
        input_bytes=rows[0].input_bytes,
        output_bytes=rows[-1].output_bytes,
        parameter_bytes=sum(cost.parameter_bytes for cost in rows),
        forward_seconds=sum(forwards),
        backward_seconds=sum(backwards),
        weight_share=min(1.0, weight_seconds / sum(backwards))
        if any(backwards)
        else 0.0,
    )


def read_costs(path: Path) -> FileCosts:
    """Return the costs of a CSV file, or of a YAML file that is a list of mappings.

    Args:
        path: the file; its columns are those of :data:`COLUMNS`, and :data:`BATCH` may follow.

    Raises:
        UserError: it cannot be read, a column is missing or unknown, a value is no number, or rows
            were measured with different micro-batches.
    """
    try:
        check_regular(path)
        if path.suffix == ".csv":
            # Values of a CSV file are texts, and those of a YAML file numbers: _cost_of_row takes
            # both.
            rows: Any = [*csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
        else:
            rows = read_plain(path)
    except OSError as error:
        raise UserError(f"costs={path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"costs={path} cannot be read: it is not text; save the table as a CSV file"
        ) from error
    except (ValueError, csv.Error) as error:
        raise UserError(f"costs={path} cannot be read: {first_line(error)}") from error
    if not isinstance(rows, list) or not rows:
        raise UserError(
            f"costs={path} is a list with a row per stage: got none; columns {', '.join(COLUMNS)}"
        )
    costs = []
    batches = []
    # The first stage receives data, which no message brings.
    input_bytes = 0.0
    for stage, row in enumerate(rows):
        place = f"costs={path}, stage {stage}"
        cost = _cost_of_row(row, place, input_bytes)
        # A stage keeps what it receives, and receives what the stage before it sends.
        input_bytes = cost.output_bytes
        costs.append(cost)
        batches.append(_batch_of_row(row, place))
    if not any(sum(_seconds(cost)) for cost in costs):
        raise UserError(
            f"costs={path}: no stage takes any time; give milliseconds above 0"
        )
    if len({*batches}) > 1:
        raise UserError(
            f"costs={path}: all rows are of one micro-batch: got {BATCH} {batches}; measure them"
            " with the same"
        )
    return FileCosts(path, tuple(costs), batches[0])


def _batch_of_row(row: Mapping[str, Any], place: str) -> int | None:
    """Return the samples of the micro-batch with which a row was measured."""
    if BATCH not in row:
        return None
    value = row[BATCH]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not (isfinite(number) and number >= 1 and number.is_integer()):
        raise UserError(
            f"{place}: {BATCH} is a number of samples, 1 or more: got {value!r}"
        )
    return int(number)


def _cost_of_row(row: Any, place: str, input_bytes: float) -> StageCost:
    """Return the cost of a stage that receives ``input_bytes``."""
    if not isinstance(row, dict) or {*row} - {BATCH} != {*COLUMNS}:
        columns = sorted(map(str, row)) if isinstance(row, dict) else row
        raise UserError(
            f"{place}: columns, between commas, are {', '.join(COLUMNS)}, and {BATCH} may follow:"
            f" got {columns}"
        )
    values = {}
    for name in COLUMNS:
        value = row[name]
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = nan
        if not 0 <= number < inf:
            raise UserError(
                f"{place}: {name} is a number, 0 or more, of {COLUMNS[name]}: got {value!r}"
            )
        values[name] = number
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
        weight_share=values["backward_weights_ms"] / backward_ms
        if backward_ms
        else 0.0,
    )

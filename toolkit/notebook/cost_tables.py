"""Tables of memory, devices and messages, as counted and as measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pandas as pd

from toolkit.cost.situations import situation_cells
from toolkit.errors import UserError
from toolkit.format import counted_cells, rank_cells, reduction_cells

if TYPE_CHECKING:
    from toolkit.cost import MemoryCurve
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.runtime.meters.predicted_vs_measured import MeasuredRow
    from toolkit.schedule.paper_table import PaperRow


def memory_saved(
    curves: "Mapping[str, MemoryCurve]", workers: Sequence[int]
) -> pd.DataFrame:
    """Return how far the peak of staggered workers is below that of simultaneous ones, by curve.

    A curve is the memory of one micro-batch. The last column is the largest reduction,
    1 - mean/peak, which no number of workers exceeds.

    Args:
        curves: memory of one micro-batch, by name.
        workers: numbers of workers.
    """
    rows = []
    for curve in curves.values():
        # Shifted by equal parts of the step, as the paper shifts them; the mean bounds all of them.
        reductions = {n_workers: curve.reduction(n_workers) for n_workers in workers}
        rows.append(reduction_cells(reductions, curve.largest_reduction))
    return pd.DataFrame(rows, index=[*curves])


def counted_and_measured(
    rows: "Sequence[PaperRow]", measured: "Sequence[MeasuredRow]" = ()
) -> pd.DataFrame:
    """Return the paper's settings counted from programs, and whether processes measured the same.

    A: activations of one micro-batch over the whole model. P: the model's parameters.

    Args:
        rows: of :func:`toolkit.schedule.paper_table.compare`.
        measured: of the same number of workers; others raise UserError.
    """
    measured_schedules = [row.measurements.schedule for row in measured]
    # Paired row by row, so the settings must be the same ones.
    if measured and measured_schedules != [row.schedule for row in rows]:
        raise UserError(
            "measured and counted schedules differ: take the same n in compare(n)"
        )
    cells = []
    for row in rows:
        footprint = {"setting": row.setting, "rule": row.rule} | asdict(row.counted)
        cells.append(counted_cells(footprint))
    # Settings are the rows that the paper compares; within each, DP comes before CDP.
    table = pd.DataFrame(cells).set_index(["setting", "rule"])
    if measured:
        table["measured"] = [
            f"{', '.join(row.differences)} differ" if row.differences else "equal"
            for row in measured
        ]
    return table


def when_cdp_helps(rows: "Iterable[Mapping[str, Any]]") -> pd.DataFrame:
    """Return a table of memory, devices and step times of CDP and DP.

    Args:
        rows: situations, as :mod:`toolkit.cost.situations` finds them.
    """
    index = ["situation", "workers", "M/C"]
    return pd.DataFrame([situation_cells(row) for row in rows]).set_index(index)


def by_rank(measurements: "Measurements") -> pd.DataFrame:
    """Return each rank's peak memory, and what it sent and received.

    Args:
        measurements: what ``runtime.measurements()`` returned.
    """
    return pd.DataFrame([rank_cells(row) for row in measurements.by_rank()]).set_index(
        "rank"
    )

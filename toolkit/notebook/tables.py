"""Tables that notebooks show."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from toolkit.errors import UserError
from toolkit.format import counted_cells, rank_cells, reduction_cells

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.cost import MemoryCurve
    from toolkit.runtime.meters.measurements import Measurements
    from toolkit.runtime.meters.predicted_vs_measured import MeasuredRow
    from toolkit.schedule.paper_table import Row


def memory_saved(curves: "Mapping[str, MemoryCurve]", workers: Sequence[int]) -> "pd.DataFrame":
    """How far the peak of shifted workers is below that of workers together, by curve.

    The last column is the largest reduction, 1 - mean/peak, which no number of workers exceeds.
    """
    import pandas as pd

    rows = {
        name: reduction_cells({n: curve.reduction(n) for n in workers}, curve.largest_reduction)
        for name, curve in curves.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def counted_and_measured(
    rows: "Sequence[Row]", measured: "Sequence[MeasuredRow]" = ()
) -> "pd.DataFrame":
    """The paper's settings as counted from programs; and whether processes measured the same.

    A: activations of one micro-batch over the whole model. P: the model's parameters.

    Args:
        rows: of :func:`toolkit.schedule.paper_table.compare`.
        measured: of as many workers, in the same order.

    Raises:
        ValueError: what was measured is not what was counted.
    """
    import pandas as pd

    ran = [row.measurements.schedule for row in measured]
    if measured and ran != [row.schedule for row in rows]:
        raise UserError(
            "what was measured ran other schedules than were counted: count as many workers as"
            " were measured, compare(n)"
        )
    found = []
    for k, row in enumerate(rows):
        counted = asdict(row.counted)
        found.append(counted_cells({"setting": row.setting, "rule": row.rule} | counted))
        if measured:
            differences = measured[k].differences
            found[-1]["measured"] = ", ".join(differences) + " differ" if differences else "equal"
    return pd.DataFrame(found).set_index(["setting", "rule"])


def by_rank(found: "Measurements") -> "pd.DataFrame":
    """What each rank held at most, and sent and received in the steps that were recorded."""
    import pandas as pd

    return pd.DataFrame([rank_cells(row) for row in found.by_rank()]).set_index("rank")

"""Tables that notebooks show."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.cost import MemoryCurve
    from toolkit.runtime.meters.comparison import MeasuredRow
    from toolkit.schedule.comparison import Row

_UNITS = {
    "ranks": "",
    "total_activations": " A",
    "activations": " A",
    "weights": " P",
    "traffic": " P",
    "messages": "",
    "traffic_in_slot": " P",
}
_NAMES = {
    "total_activations": "activations, all",
    "activations": "activations, a rank",
    "traffic": "sent",
    "traffic_in_slot": "in a slot",
}


def memory_saved(curves: "Mapping[str, MemoryCurve]", workers: Sequence[int]) -> "pd.DataFrame":
    """How far the peak of shifted workers is below that of workers together, by curve.

    The last column is the floor, 1 - mean/peak, which no number of workers exceeds.
    """
    import pandas as pd

    rows = {
        name: {f"N = {n}": f"{curve.reduction(n):.1%}" for n in workers}
        | {"1 - mean/peak": f"{curve.floor:.1%}"}
        for name, curve in curves.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def counted_and_measured(
    rows: "Sequence[Row]", measured: "Sequence[MeasuredRow]" = ()
) -> "pd.DataFrame":
    """The paper's settings as counted from programs; and whether processes measured the same.

    A: activations of one micro-batch over the whole model. P: the model's parameters.

    Args:
        rows: of :func:`toolkit.schedule.comparison.compare`.
        measured: of as many workers, in the same order.
    """
    import pandas as pd

    found = []
    for k, row in enumerate(rows):
        counted = {
            _NAMES.get(name, name): _fraction(getattr(row.counted, name)) + unit
            for name, unit in _UNITS.items()
        }
        found.append({"setting": row.setting, "rule": row.rule} | counted)
        if measured:
            differences = measured[k].differences
            found[-1]["measured"] = ", ".join(differences) + " differ" if differences else "equal"
    return pd.DataFrame(found).set_index(["setting", "rule"])


def _fraction(value: Fraction | int) -> str:
    return str(Fraction(value))

"""What the delay of the weights did to the gradients, summed up."""

from collections.abc import Mapping, Sequence
from typing import Any

_MEASURED = ["delay", "cosine", "gradient", "fresh_gradient", "moved", "weights"]


def delay_means(delays: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[dict[str, Any]]:
    """Means over training steps, a row for each combination of the columns ``by``.

    The first step of all is left out where there are others: nothing is late in it yet.

    Args:
        delays: rows of :class:`toolkit.runtime.diagnostics.StageDelay`, and what they are of; or
            means of such, which have no step.
        by: columns, such as the stage. What could not be measured at a step is left out.
    """
    if not delays:
        return []
    import pandas as pd

    later = [row for row in delays if row.get("step", 1) > 0]
    groups = pd.DataFrame(later or delays).groupby([*by], as_index=False, sort=False)
    return groups[_MEASURED].mean().to_dict("records")

"""Memory of micro-batches that repeat one curve, each shifted in time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def shifted_levels(levels: NDArray[Any], shifts: NDArray[Any]) -> NDArray[Any]:
    """Return ``[bin, shift]``, what a micro-batch keeps in a bin of the period if it is shifted.

    Args:
        levels: ``[bin]``, what one keeps that starts in bin 0; after the last bin they repeat.
        shifts: ``[shift]``, bins in which micro-batches start.
    """
    bins = np.arange(len(levels))
    return levels[(bins[:, None] - shifts) % len(levels)]

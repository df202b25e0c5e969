"""What the loss of a rank cost a training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recovery:
    """A lost rank, and what it cost.

    Attributes:
        message: which rank was lost, and where.
        step: training steps that were done.
        restart: step from which training continued.
        seconds: from the failure's report until all ranks had the state again.
    """

    message: str
    step: int
    restart: int
    seconds: float

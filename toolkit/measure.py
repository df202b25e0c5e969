"""By what trained models are judged."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """A number that tells how good a model is.

    Attributes:
        metric: its name among an epoch's.
        name: what it is called.
        unit: in which it is given.
        unit_of_differences: in which differences of it are.
        decimals: with how many it is written.
        lower_is_better: whether it is.
    """

    metric: str
    name: str
    unit: str
    unit_of_differences: str
    decimals: int
    lower_is_better: bool


ACCURACY = Measure("top1", "accuracy", "%", "points", 2, lower_is_better=False)
LOSS = Measure("test_loss", "loss", "nats", "nats", 3, lower_is_better=True)

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
        factor: by which the metric is multiplied to be in ``unit``.
        columns: in a comparison's result: the mean, its standard deviation, the difference from the
            first rule, and half that one's interval.
    """

    metric: str
    name: str
    unit: str
    unit_of_differences: str
    decimals: int
    lower_is_better: bool
    factor: float
    columns: tuple[str, str, str, str]


ACCURACY = Measure(
    "top1",
    "accuracy",
    "%",
    "points",
    decimals=2,
    lower_is_better=False,
    factor=100,
    columns=("accuracy", "accuracy_sd", "difference", "difference_95"),
)
LOSS = Measure(
    "test_loss",
    "loss",
    "nats",
    "nats",
    decimals=3,
    lower_is_better=True,
    factor=1,
    columns=("loss", "loss_sd", "loss_difference", "loss_difference_95"),
)

"""By what trained models are judged."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number that tells how good a model is.

    Attributes:
        key: name among the metrics of an epoch.
        name: what tables and figures call it.
        unit: in which they show it.
        unit_of_differences: in which they show differences of it.
        decimals: digits after the point.
        lower_is_better: whether a model is the better, the lower it is.
        factor: from the metric to ``unit``.
        columns: names in a comparison's result: of the mean, of its standard deviation, of the
            difference from the first rule, and of half the interval of that.
    """

    key: str
    name: str
    unit: str
    unit_of_differences: str
    decimals: int
    lower_is_better: bool
    factor: float
    columns: tuple[str, str, str, str]


ACCURACY = Metric(
    "top1",
    "accuracy",
    "%",
    "points",
    decimals=2,
    lower_is_better=False,
    factor=100,
    columns=("accuracy", "accuracy_sd", "difference", "difference_95"),
)
LOSS = Metric(
    "test_loss",
    "loss",
    "nats",
    "nats",
    decimals=3,
    lower_is_better=True,
    factor=1,
    columns=("loss", "loss_sd", "loss_difference", "loss_difference_95"),
)

"""Evaluation metrics."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is.

    Attributes:
        key: name among the metrics of an epoch.
        name: label in tables and figures.
        unit: unit of values.
        unit_of_differences: unit of differences.
        decimals: digits after the point.
        lower_is_better: whether smaller values are better.
        factor: from the metric to ``unit``.
        columns: names in a comparison's result of the mean, its standard deviation, the difference
            from the first rule and half of its interval.
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
    key="top1",
    name="accuracy",
    unit="%",
    unit_of_differences="points",
    decimals=2,
    lower_is_better=False,
    factor=100,
    columns=("accuracy", "accuracy_sd", "difference", "difference_95"),
)
LOSS = Metric(
    key="test_loss",
    name="loss",
    unit="nats",
    unit_of_differences="nats",
    decimals=3,
    lower_is_better=True,
    factor=1,
    columns=("loss", "loss_sd", "loss_difference", "loss_difference_95"),
)

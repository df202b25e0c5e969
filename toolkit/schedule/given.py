"""Values as users give them: whole numbers, Python's and NumPy's, and one of several names."""

from collections.abc import Collection
from numbers import Integral

MOST = 2**20
"""Forwards of a training step: schedules of more take minutes to make, and gigabytes."""


def whole(value: object, what: str, least: int | None = None) -> int:
    """``value`` as an int.

    Args:
        value: a whole number of any library; true and false are none.
        what: it is called in the error.
        least: that it may be.

    Raises:
        ValueError: it is no whole number, or less than that.
    """
    if (
        not isinstance(value, Integral)
        or isinstance(value, bool)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f", {least} or more"
        raise ValueError(f"{what} is a whole number{bound}: got {value!r}")
    return int(value)


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Refuse a ``value`` that is none of the ``choices``; ``what`` it is called in the error.

    Raises:
        ValueError: it is none.
    """
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")


def check_forwards(n_stages: int, n_microbatches: int) -> None:
    """Refuse a training step of more than :data:`MOST` forwards.

    Raises:
        ValueError: it has.
    """
    if n_stages * n_microbatches > MOST:
        raise ValueError(
            f"a schedule has at most {MOST} forwards, one of each stage for each micro-batch: got"
            f" {n_stages} stages and {n_microbatches} micro-batches; lower either"
        )

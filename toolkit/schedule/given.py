"""Values as users give them: whole numbers, Python's and NumPy's, and one of several names."""

from collections.abc import Collection
from numbers import Integral

from toolkit.errors import UserError

MOST = 2**20
"""Forwards of a training step: schedules of more take minutes to make, and gigabytes."""


def whole(value: object, what: str, least: int | None = None) -> int:
    """``value`` as an int.

    Args:
        value: a whole number of any library; bools are refused.
        what: its name in the error.
        least: smallest value allowed.

    Raises:
        ValueError: the value is no whole number, or below ``least``.
    """
    if (
        not isinstance(value, Integral)
        or isinstance(value, bool)
        or (least is not None and value < least)
    ):
        bound = "" if least is None else f", {least} or more"
        raise UserError(f"{what} is a whole number{bound}: got {value!r}")
    return int(value)


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Refuse a ``value`` that is none of the ``choices``; ``what`` is its name in the error.

    Raises:
        ValueError: the value is none of them.
    """
    if value not in choices:
        raise UserError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")


def check_forwards(n_stages: int, n_microbatches: int) -> None:
    """Refuse a training step of more than :data:`MOST` forwards.

    Raises:
        ValueError: there are more.
    """
    if n_stages * n_microbatches > MOST:
        raise UserError(
            f"a schedule has at most {MOST} forwards, one of each stage for each micro-batch: got"
            f" {n_stages} stages and {n_microbatches} micro-batches; lower either"
        )

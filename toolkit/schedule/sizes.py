"""Whole numbers as users give them: Python's, NumPy's, and what is none."""

from numbers import Integral


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

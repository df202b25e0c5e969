"""Errors that are the user's to correct, and their wording."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from numbers import Integral


class UserError(ValueError):
    """A mistake of the user: the message gives the value, the constraint and the way out.

    The command line prints it as one line and exits with status 2. Any other exception is a bug
    and keeps its traceback.
    """


def first_line(error: BaseException) -> str:
    """First non-blank line of the error's message; the error's repr if the message is blank."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def last_line(error: BaseException) -> str:
    """Last non-blank line of the error's message; the error's repr if the message is blank."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def suggest(choice: str, valid: Sequence[str]) -> str:
    """Advice for an unknown ``choice``: the nearest valid name, and all of them."""
    near = get_close_matches(choice, valid, n=1, cutoff=0.4)
    return "".join(f"did you mean {name}? " for name in near) + f"choose one of {', '.join(valid)}"


def whole(value: object, what: str, least: int | None = None) -> int:
    """Return ``value`` as an int.

    Args:
        value: a whole number of any library; bools are refused.
        what: its name in the error.
        least: smallest value allowed.

    Raises:
        UserError: the value is not a whole number, or is below ``least``.
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
    """Check that ``value`` is one of the ``choices``.

    Args:
        what: name of the value in the error.
        value: the value to check.
        choices: the valid values.

    Raises:
        UserError: the value is not one of them.
    """
    if value not in choices:
        raise UserError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")

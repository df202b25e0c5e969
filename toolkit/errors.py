"""Errors that the user can correct, and their wording."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from numbers import Integral


class UserError(ValueError):
    """A mistake of the user: the message gives the value, the constraint and the way out.

    The command line prints it as one line and exits with status 2. Any other exception is a bug
    and keeps its traceback.
    """


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error's message, or its repr if there is none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def shortened(text: str, most: int = 200) -> str:
    """Return ``text``, cut in the middle to at most ``most`` characters."""
    half = (most - 5) // 2
    return text if len(text) <= most else f"{text[:half]} ... {text[-half:]}"


def suggest(choice: str, valid: Sequence[str]) -> str:
    """Return advice for an unknown ``choice``: the nearest valid name, and all of them."""
    matches = get_close_matches(choice, valid, n=1, cutoff=0.4)
    matches = [name for name in valid if choice and name.startswith(choice)][:1] or matches
    return (
        "".join(f"did you mean {name}? " for name in matches) + f"choose one of {', '.join(valid)}"
    )


def whole(value: object, what: str, least: int | None = None) -> int:
    """Return ``value``, a whole number of any library, as an int.

    Raises:
        UserError: ``value``, called ``what``, is not a whole number, or is below ``least``.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if least is None or number >= least:
            return number
    bound = "" if least is None else f", {least} or more"
    raise UserError(f"{what} is a whole number{bound}: got {value!r}")


def check_choice(what: str, value: object, choices: Collection[str]) -> None:
    """Raise UserError unless ``value``, called ``what``, is one of the ``choices``."""
    if value not in choices:
        raise UserError(f"unknown {what} {value!r}: choose one of {', '.join(choices)}")

"""Errors that the user can correct, and their wording."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from math import inf
from numbers import Integral, Real
from typing import TypeGuard


class UserError(ValueError):
    """A mistake of the user: the message gives the value, the constraint and the way out.

    The command line prints it as one line and exits with status 2. Any other exception is a bug
    and keeps its traceback.
    """


def first_line(error: BaseException) -> str:
    """Return the first non-blank line of an error's message, or its repr if there is none."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0].strip()


def shortened(text: str, max_length: int = 200) -> str:
    """Return ``text``, cut in the middle to at most ``max_length`` characters."""
    if len(text) <= max_length:
        return text
    half = (max_length - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def suggest(choice: str, valid: Sequence[str]) -> str:
    """Return advice for an unknown ``choice``: the nearest valid name, and all of them."""
    matches = get_close_matches(choice, valid, n=1, cutoff=0.4)
    if choice:
        matches = [name for name in valid if name.startswith(choice)] + matches
    question = f"did you mean {matches[0]}? " if matches else ""
    return f"{question}choose one of {', '.join(valid)}"


def whole(value: object, name: str, minimum: int | None = None) -> int:
    """Return ``value``, a whole number of any library, as an int.

    Raises:
        UserError: ``value``, called ``name``, is not a whole number, or is below ``minimum``.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if minimum is None or number >= minimum:
            return number
    bound = "" if minimum is None else f", {minimum} or more"
    raise UserError(f"{name} is a whole number{bound}: got {value!r}")


def check_seconds(name: str, value: object) -> None:
    """Raise UserError unless ``value``, called ``name``, is a finite number of seconds above 0."""
    if not (is_number(value) and 0 < value < inf):
        raise UserError(f"{name} is a number of seconds above 0: got {value!r}")


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number of any library, infinite or finite; not nan."""
    return isinstance(value, Real) and not isinstance(value, bool) and value == value


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise UserError unless ``value``, called ``name``, is one of the ``choices``."""
    if value not in choices:
        raise UserError(f"unknown {name} {value!r}: choose one of {', '.join(choices)}")

"""What errors say."""

from collections.abc import Sequence
from difflib import get_close_matches


def first_line(error: BaseException) -> str:
    """The first line of its message that says anything; else the error as Python shows it."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))


def last_line(error: BaseException) -> str:
    """The last line of its message that says anything; else the error as Python shows it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else repr(error)


def instead(choice: str, valid: Sequence[str]) -> str:
    """What to choose in the place of ``choice``: the nearest, if one is near, and all there are."""
    near = get_close_matches(choice, valid, n=1, cutoff=0.4)
    return "".join(f"did you mean {name}? " for name in near) + f"choose one of {', '.join(valid)}"

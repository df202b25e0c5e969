"""Options that count something."""

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.errors import UserError


def check_counts(config: Mapping[Any, Any], *names: str, of: str = "") -> None:
    """Refuse options that are below 1.

    Args:
        config: the options.
        names: of those that count.
        of: what stands before their names on the command line.

    Raises:
        ValueError: with the first that is below 1.
    """
    for name in names:
        if config[name] < 1:
            raise UserError(f"{of}{name} is 1 or more: got {config[name]}")


def counts(config: Mapping[Any, Any], name: str) -> list[int]:
    """An option that is a list of counts, or one of them by itself.

    Raises:
        ValueError: it is empty, or has what is no whole number above 0.
    """
    given = config[name]
    found = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not found or not all(type(n) is int and n > 0 for n in found):
        raise UserError(f"{name} is a list of whole numbers above 0: got {found}")
    return found

"""Options that count something."""

from collections.abc import Mapping
from typing import Any


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
            raise ValueError(f"{of}{name} is 1 or more: got {config[name]}")

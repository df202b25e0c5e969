"""Options that stand for others."""

from collections.abc import Sequence
from typing import Any


def spell_out(config: Any) -> None:
    """Give ``workers``, where one is chosen, to what it is short for.

    Args:
        config: of an experiment; changed in place.
    """
    if config.get("workers") is not None and "microbatches" in config:
        config["microbatches"] = config["workers"]


def check_given(arguments: Sequence[str]) -> None:
    """Refuse a command line that says the same thing twice.

    Raises:
        ValueError: it gives ``workers`` and ``microbatches``.
    """
    both = [a for a in arguments if a.partition("=")[0] in ("workers", "microbatches")]
    if len({argument.partition("=")[0] for argument in both}) == 2:
        raise ValueError(
            f"{' and '.join(both)}: workers sets microbatches, so leave one of them out"
        )

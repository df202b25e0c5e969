"""Options that stand for others."""

from typing import Any


def spell_out(config: Any) -> None:
    """Give ``workers``, where one is chosen, to what it is short for.

    Args:
        config: of an experiment; changed in place.
    """
    if config.get("workers") is not None and "microbatches" in config:
        config["microbatches"] = config["workers"]

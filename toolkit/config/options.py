"""An option of an experiment: its value, and the line that ``--help`` prints for it."""

from dataclasses import field
from typing import Any


def option(default: Any, description: str) -> Any:
    """A field with the line that ``--help`` prints for it."""
    return field(default=default, metadata={"help": description})


def option_list(default: list[Any], description: str) -> Any:
    """:func:`option` for a list."""
    return field(default_factory=lambda: list(default), metadata={"help": description})

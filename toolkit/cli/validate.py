"""Checks of options."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

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


def check_known(config: DictConfig, group: str = "") -> None:
    """Refuse options that a schema lacks, in ``config`` and in its groups.

    What a ``_target_`` is called with is left to what is called.

    Args:
        config: resolved.
        group: that it is, with a dot at its end.

    Raises:
        ValueError: with the first one.
    """
    kind = OmegaConf.get_type(config)
    if "_target_" in config or not is_dataclass(kind):
        return
    known = [field.name for field in fields(kind)]
    for name in map(str, config):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {group}{near[0]}?" if near else "--help lists the options"
            raise UserError(f"+{group}{name}: there is no option {group}{name}: {hint}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            check_known(config[name], f"{group}{name}.")

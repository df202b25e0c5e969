"""Options that a resumed run has otherwise than when it was saved."""

from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from toolkit.options import INDIFFERENT, differing, flat, without

_MOST_TOLD = 4
_FREE = INDIFFERENT | {"epochs"}  # a run may go on for longer than was planned


def changed_options(before: object, now: DictConfig, free: Collection[str] = _FREE) -> str:
    """What differs in options on which the trajectory depends; empty if nothing does.

    An option that there was not yet was as if it had the value that its schema gives it.

    Args:
        before: options as YAML, if they are known.
        now: the options of the run.
        free: options, or groups of them, of which nothing is told.
    """
    if not isinstance(before, str):
        return ""
    try:
        kept: Any = OmegaConf.to_container(OmegaConf.create(before))
    except (OmegaConfBaseException, YAMLError):
        return ""
    if not isinstance(kept, dict):
        return ""
    given: Any = OmegaConf.to_container(now)
    old, new = (without(flat(options), free) for options in (kept, given))
    known = dict.fromkeys(sorted(old.keys() | new.keys()))
    usual = {k: v for k, v in new.items() if k not in old and _is_usual(now, k, v)}
    names = differing([known | usual | old, known | new])
    told = [f"{name}={new.get(name)} (was {old.get(name)})" for name in names[:_MOST_TOLD]]
    more = [f"and {len(names) - _MOST_TOLD} more"] if len(names) > _MOST_TOLD else []
    return ", ".join([*told, *more])


def _is_usual(options: DictConfig, name: str, value: object) -> bool:
    """Whether ``value`` is what the schema of an option gives it."""
    group, _, last = name.rpartition(".")
    node = OmegaConf.select(options, group) if group else options
    schema = OmegaConf.get_type(node) if OmegaConf.is_config(node) else None
    if not is_dataclass(schema):
        return False
    usual = OmegaConf.to_container(OmegaConf.structured(schema))
    return isinstance(usual, dict) and last in usual and bool(usual[last] == value)

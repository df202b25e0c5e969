"""Options that a resumed run has otherwise than when it was saved."""

from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from toolkit.options import INDIFFERENT, differing, flat, without

_MOST_TOLD = 4
_STEPS = 4  # of an epoch, at which learning rates are compared
FREE = INDIFFERENT | {"epochs"}  # a run may go on for longer than was planned


def changed_options(before: object, now: DictConfig, free: Collection[str] = FREE) -> str:
    """What differs in options on which the trajectory depends; empty if nothing does.

    An option that there was not yet was as if it had the value that its schema gives it.

    Args:
        before: options as YAML, if they are known.
        now: the options of the run.
        free: options, or groups of them, of which nothing is told.
    """
    kept = _read(before)
    if kept is None:
        return ""
    given: Any = OmegaConf.to_container(now)
    old, new = (without(flat(options), free) for options in (kept, given))
    known = dict.fromkeys(sorted(old.keys() | new.keys()))
    usual = {k: v for k, v in new.items() if k not in old and _is_usual(now, k, v)}
    names = differing([known | usual | old, known | new])
    told = [f"{name}={new.get(name)} (was {old.get(name)})" for name in names[:_MOST_TOLD]]
    more = [f"and {len(names) - _MOST_TOLD} more"] if len(names) > _MOST_TOLD else []
    return ", ".join([*told, *more])


def rate_follows_epochs(before: object, now: DictConfig) -> bool:
    """Whether the epochs asked for now have the learning rate fall otherwise than those before.

    As half a cosine over all of them does, and steps of so many epochs do not.
    """
    planned = (_read(before) or {}).get("epochs")
    if not isinstance(planned, int) or planned == now.epochs:
        return False
    rates = instantiate(now.lr)
    steps = range(_STEPS * planned)
    both = [[rates.factor(k, _STEPS, n, 1) for k in steps] for n in (planned, now.epochs)]
    return both[0] != both[1]


def _read(options: object) -> dict[Any, Any] | None:
    """Options that were kept as YAML, if that is what they are."""
    if not isinstance(options, str):
        return None
    try:
        kept = OmegaConf.to_container(OmegaConf.create(options))
    except (OmegaConfBaseException, YAMLError):
        return None
    return kept if isinstance(kept, dict) else None


def _is_usual(options: DictConfig, name: str, value: object) -> bool:
    """Whether ``value`` is what the schema of an option gives it."""
    group, _, last = name.rpartition(".")
    node = OmegaConf.select(options, group) if group else options
    schema = OmegaConf.get_type(node) if OmegaConf.is_config(node) else None
    if not is_dataclass(schema):
        return False
    usual = OmegaConf.to_container(OmegaConf.structured(schema))
    return isinstance(usual, dict) and last in usual and bool(usual[last] == value)

"""Options that a resumed run has otherwise than when it was saved."""

from collections.abc import Collection
from dataclasses import is_dataclass

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

_MOST_TOLD = 4
INDIFFERENT = (
    *("epochs", "resume", "save", "guard", "guard_factor", "runtime", "workers", "device"),
    *("threads", "tracking", "profile", "diagnostics", "data.num_workers", "data.prefetch_factor"),
)
"""What may change without a word: the training does not depend on it."""


def changed_options(
    before: object, now: DictConfig, indifferent: Collection[str] = INDIFFERENT
) -> str:
    """What differs in options on which the trajectory depends; empty if nothing does.

    An option that there was not yet was as if it had the value that its schema gives it.

    Args:
        before: options as YAML, if they are known.
        now: the options of the run.
        indifferent: options, or groups of them, of which nothing is told.
    """
    if not isinstance(before, str):
        return ""
    try:
        old = _flat(OmegaConf.to_container(OmegaConf.create(before)))
    except (OmegaConfBaseException, YAMLError):
        return ""
    new = _flat(OmegaConf.to_container(now))
    names = [
        name
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
        and not (name not in old and _is_usual(now, name, new[name]))
        and not any(f"{name}.".startswith(f"{group}.") for group in indifferent)
    ]
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


def _flat(options: object, prefix: str = "") -> dict[str, object]:
    """``{"a.b": c}`` of ``{"a": {"b": c}}``."""
    if not isinstance(options, dict):
        return {prefix.removesuffix("."): options}
    found: dict[str, object] = {}
    for name, value in options.items():
        found |= _flat(value, f"{prefix}{name}.")
    return found

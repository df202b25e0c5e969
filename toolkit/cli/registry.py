"""The registry of schemas, which give options their names, types, defaults and help texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, get_args, get_origin

SCHEMAS: dict[str, dict[str, type]] = {}
"""By group and name."""


def schema(group: str, name: str) -> Callable[[type], Any]:
    """Make a class a dataclass, and register it as ``schema/<group>/<name>``."""

    def register(kind: type) -> type:
        made: Any = dataclass(kind)
        SCHEMAS.setdefault(group, {})[name] = made
        return made

    return register


def schema_of(options: type, *without: str) -> type:
    """A schema with the names, defaults and help texts of a frozen dataclass of options.

    OmegaConf cannot hold unions with sequences: such types become Any.
    """

    def known(kind: Any) -> Any:
        sequence = any(get_origin(k) is Sequence for k in (kind, *get_args(kind)))
        return Any if sequence or is_dataclass(kind) else kind

    return make_dataclass(
        options.__name__,
        [
            (
                f.name,
                known(f.type),
                field(default=f.default, default_factory=f.default_factory, metadata=f.metadata),
            )
            for f in fields(options)
            if f.name not in without
        ],
    )

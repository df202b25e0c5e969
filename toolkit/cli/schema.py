"""Types and help texts of all options, from the files in conf/ and the dataclasses of options.

A line ``name: default # help`` of a file has the type of its default; ``# int: help`` names a type
that null hides, and ``# any: help`` leaves it open. A file that begins with
``/schema/GROUP/CHOICE@_here_`` has these types: a misspelt option or a value of another type fails
when the configuration is composed.
"""

import re
from collections.abc import Sequence
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from toolkit.files import conf
from toolkit.options import TrackingOptions, TrainingOptions, TuneOptions

Options = dict[str, tuple[Any, Any]]
"""By name, an option's type and its dataclass field."""

PRESETS = ("experiment", "study", "sweep")
"""Groups whose choices set options of others, and which may be null."""
_LINE = re.compile(r"^(\w+):.*? #(?: (int|float|str|any)(?::|$))? ?(.*)$", re.MULTILINE)
_DECLARED = {"int": int | None, "float": float | None, "str": str | None, "any": Any}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
_GUARD = ("guard", "guard_factor")  # in a comparison, only NaN ends a run


@cache
def schemas() -> dict[str, dict[str, type]]:
    """Return the schemas by group and choice; group ``experiment`` has those of experiments."""
    folder, found = conf(), dict[str, dict[str, type]]()
    for path in sorted(folder.rglob("*.yaml")):
        inside = path.parent.relative_to(folder).as_posix()
        group, name = "experiment" if inside == "." else inside, path.stem
        if f"schema/{group}/{name}@_here_" in path.read_text():
            options = _of_file(path)
            if name in ("train", "compare"):
                training = _of_dataclass(TrainingOptions)
                training["tracking"] = _nested("tracking", TrackingOptions)
                options = training | {k: v for k, v in options.items() if k not in training}
            if name == "compare":
                options = {k: v for k, v in options.items() if k not in _GUARD}
                options["tune"] = _nested("tune", TuneOptions)
            found.setdefault(group, {})[name] = _made(name, options)
    return found


@cache
def register() -> None:
    """Make the schemas known to Hydra."""
    for group, nodes in schemas().items():
        for name, node in nodes.items():
            ConfigStore.instance().store(group=f"schema/{group}", name=name, node=node)


def helps(kind: type | None) -> dict[str, str]:
    """Help texts of a schema's fields; empty if ``kind`` is not a schema."""
    found = fields(kind) if is_dataclass(kind) else ()
    return {f.name: f.metadata["help"] for f in found if "help" in f.metadata}


def option_names(experiment: str) -> list[str]:
    """Return the dotted names of an experiment's options, for every choice of its groups."""
    own = fields(schemas()["experiment"][experiment])
    found = [f.name for f in own]
    for option in own:
        if is_dataclass(kind := option.default_factory):
            found += [f"{option.name}.{f.name}" for f in fields(kind)]
    for group, nodes in schemas().items():
        rule = group == "schedule" and "rules" in found
        if group in found or rule:
            names = {f.name for node in nodes.values() for f in fields(node)} - {"_target_"}
            found += [f"{'rules.NAME' if rule else group}.{name}" for name in sorted(names)]
    return found


@cache
def _of_file(path: Path) -> Options:
    """Options of a file, and of the files that it extends."""
    text = path.read_text()
    values = yaml.load(text, Loader=_Loader)
    described = {name: found for name, *found in _LINE.findall(text)}
    options: Options = {}
    for entry in values.pop("defaults", ()):
        if isinstance(entry, str):
            base = path.parent / f"{entry}.yaml"
            options |= _of_file(base) if base.is_file() else {}
        elif not (group := next(iter(entry))).startswith("override") and group not in PRESETS:
            place = group.partition("@")[2].partition(".")[0]  # rules of schedule@rules.dp
            default = MISSING if entry[group] is not None else None
            options[place or group] = (dict[str, Any] if place else Any), field(default=default)
    values.pop("hydra", None)
    for name, value in values.items():
        declared, text = described.get(name, ("", ""))
        kind = _DECLARED.get(declared, _type(value))
        options[name] = kind, field(default=MISSING, metadata={"help": text} if text else {})
    return options


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return list[type(value[0])] if value else list[Any]  # type: ignore[misc]
    return dict[str, Any] if isinstance(value, dict) else type(value)


def _of_dataclass(kind: Any) -> Options:
    """Options that a dataclass describes; OmegaConf has no unions with sequences."""
    found: Options = {}
    for f in fields(kind):
        if is_dataclass(f.type):
            found[f.name] = _nested(f.name, f.type)
        else:
            several = any(get_origin(one) is Sequence for one in get_args(f.type))
            listed = get_origin(f.type) is Sequence
            default: Any = {"default": f.default, "default_factory": f.default_factory}
            taken = list[get_args(f.type)] if listed else f.type  # type: ignore[misc]
            found[f.name] = Any if several else taken, field(**default, metadata=f.metadata)
    return found


def _nested(name: str, kind: Any) -> tuple[Any, Any]:
    node = _made(name, _of_dataclass(kind))
    return node, field(default_factory=node)


def _made(name: str, options: Options) -> type:
    return make_dataclass(name, [(key, *of_key) for key, of_key in options.items()])

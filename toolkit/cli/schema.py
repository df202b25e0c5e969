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
from toolkit.options import SaveOptions, TrackingOptions, TrainingOptions

Options = dict[str, tuple[Any, Any]]
"""By name, an option's type and its dataclass field."""

PRESETS = ("experiment", "study", "sweep")
"""Groups whose choices set options of others, and which may be null."""
_LINE = re.compile(r"^(\w+):.*? #(?: (int|float|str|any)(?::|$))? ?(.*)$", re.MULTILINE)
_DECLARED = {"int": int | None, "float": float | None, "str": str | None, "any": Any}
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
_GUARD = "guard", "guard_factor"  # in a comparison, only NaN ends a run


@cache
def schemas() -> dict[str, dict[str, type]]:
    """Return the schemas by group and choice; group ``experiment`` has those of experiments."""
    folder, found = conf(), dict[str, dict[str, type]]()
    for path in sorted(folder.rglob("*.yaml")):
        inside = path.parent.relative_to(folder).as_posix()
        group, name = "experiment" if inside == "." else inside, path.stem
        if f"schema/{group}/{name}@_here_" in path.read_text():
            options = _options(path)
            if name in ("train", "compare"):
                shared = _of_training(*(_GUARD if name == "compare" else ()))
                options = shared | options | {n: shared[n] for n in ("save", "tracking")}
            node = make_dataclass(name, [(key, *of_key) for key, of_key in options.items()])
            found.setdefault(group, {})[name] = node
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
def _options(path: Path) -> Options:
    """Options of a file, and of the files that it extends."""
    text = path.read_text()
    values = yaml.load(text, Loader=_Loader)
    described = {name: found for name, *found in _LINE.findall(text)}
    options: Options = {}
    for entry in values.pop("defaults", ()):
        if isinstance(entry, str):
            base = path.parent / f"{entry}.yaml"
            options |= _options(base) if base.is_file() else {}
        elif not (group := next(iter(entry))).startswith("override") and group not in PRESETS:
            place = group.partition("@")[2].partition(".")[0]  # rules of schedule@rules.dp
            options[place or group] = _option(dict[str, Any] if place else Any)
    values.pop("hydra", None)
    for name, value in values.items():
        declared, meaning = described.get(name, ("", ""))
        options[name] = _option(_DECLARED.get(declared, _type(value)), meaning)
    return options


def _type(value: Any) -> Any:
    if isinstance(value, list):
        return list[type(value[0])] if value else list[Any]  # type: ignore[misc]
    return dict[str, Any] if isinstance(value, dict) else type(value)


def _option(kind: Any, text: str = "") -> tuple[Any, Any]:
    return kind, field(default=MISSING, metadata={"help": text} if text else {})


def _of_training(*without: str) -> Options:
    """Options of ``train`` and ``compare`` that the dataclasses of toolkit.options describe."""
    found = _copied(TrainingOptions, *without)
    for name, kind in {"save": SaveOptions, "tracking": TrackingOptions}.items():
        node = make_dataclass(name, [(key, *of_key) for key, of_key in _copied(kind).items()])
        found[name] = node, field(default_factory=node)
    return found


def _copied(kind: Any, *without: str) -> Options:
    """Options of a dataclass; OmegaConf has no unions with sequences."""

    def known(kind: Any) -> Any:
        return Any if any(get_origin(k) is Sequence for k in (kind, *get_args(kind))) else kind

    return {
        f.name: (
            known(f.type),
            field(default=f.default, default_factory=f.default_factory, metadata=f.metadata),
        )
        for f in fields(kind)
        if f.name not in without
    }

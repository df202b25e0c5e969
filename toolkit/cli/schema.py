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

SchemaOptions = dict[str, tuple[Any, Any]]
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
    config_folder, schemas_of_group = conf(), dict[str, dict[str, type]]()
    for path in sorted(config_folder.rglob("*.yaml")):
        subfolder = path.parent.relative_to(config_folder).as_posix()
        group = subfolder
        if group == ".":
            group = "experiment"
        name = path.stem
        # Only a file that extends its own schema gets one.
        if f"schema/{group}/{name}@_here_" in path.read_text():
            options = _of_file(path)
            # Options of a training are those of its dataclass, so that Python and YAML cannot
            # differ.
            if name in ("train", "compare"):
                training = _of_dataclass(TrainingOptions)
                training["tracking"] = _nested("tracking", TrackingOptions)
                options = training | {
                    key: option
                    for key, option in options.items()
                    if key not in training
                }
            if name == "compare":
                options = {
                    key: option for key, option in options.items() if key not in _GUARD
                }
                options["tune"] = _nested("tune", TuneOptions)
            schemas_of_group.setdefault(group, {})[name] = _made(name, options)
    return schemas_of_group


@cache
def register() -> None:
    """Register the schemas with Hydra."""
    for group, nodes in schemas().items():
        for name, node in nodes.items():
            ConfigStore.instance().store(group=f"schema/{group}", name=name, node=node)


def helps(kind: type | None) -> dict[str, str]:
    """Help texts of a schema's fields; empty if ``kind`` is not a schema."""
    if not is_dataclass(kind):
        return {}
    return {
        schema_field.name: schema_field.metadata["help"]
        for schema_field in fields(kind)
        if "help" in schema_field.metadata
    }


def option_names(experiment: str) -> list[str]:
    """Return the dotted names of an experiment's options, for every choice of its groups."""
    experiment_fields = fields(schemas()["experiment"][experiment])
    names = [option_field.name for option_field in experiment_fields]
    for option in experiment_fields:
        nested = option.default_factory
        if is_dataclass(nested):
            names += [
                f"{option.name}.{nested_field.name}" for nested_field in fields(nested)
            ]
    for group, nodes in schemas().items():
        prefix = group
        if group == "schedule" and "rules" in names:
            prefix = "rules.NAME"
        if group in names or prefix != group:
            field_names = set()
            for node in nodes.values():
                field_names |= {option_field.name for option_field in fields(node)}
            names += [f"{prefix}.{name}" for name in sorted(field_names - {"_target_"})]
    return names


@cache
def _of_file(path: Path) -> SchemaOptions:
    """Return the options of a file, and of the files that it extends."""
    text = path.read_text()
    values = yaml.load(text, Loader=_Loader)
    described_options = {
        name: type_and_help for name, *type_and_help in _LINE.findall(text)
    }
    options: SchemaOptions = {}
    for entry in values.pop("defaults", ()):
        if isinstance(entry, str):
            base_file = path.parent / f"{entry}.yaml"
            if base_file.is_file():
                options |= _of_file(base_file)
            continue
        # An entry such as `model: resnet18` makes the group an option.
        group, choice = next(iter(entry.items()))
        if group.startswith("override") or group in PRESETS:
            continue
        default = MISSING
        if choice is None:
            default = None
        # Rules of schedule@rules.dp.
        package = group.partition("@")[2].partition(".")[0]
        if package:
            options[package] = dict[str, Any], field(default=default)
        else:
            options[group] = Any, field(default=default)
    values.pop("hydra", None)
    for name, value in values.items():
        declared_type, text = described_options.get(name, ("", ""))
        option_type = _DECLARED.get(declared_type, _type(value))
        metadata = {}
        if text:
            metadata["help"] = text
        options[name] = option_type, field(default=MISSING, metadata=metadata)
    return options


def _type(value: Any) -> Any:
    """Return the type of an option from its default."""
    if isinstance(value, dict):
        return dict[str, Any]
    if not isinstance(value, list):
        return type(value)
    if not value:
        return list[Any]
    return list[type(value[0])]  # type: ignore[misc]


def _of_dataclass(kind: Any) -> SchemaOptions:
    """Return the options that a dataclass describes.

    OmegaConf has no unions with sequences, so an option of such a type takes any value.
    """
    options: SchemaOptions = {}
    for option_field in fields(kind):
        option_type: Any = option_field.type
        if is_dataclass(option_type):
            options[option_field.name] = _nested(option_field.name, option_type)
            continue
        type_arguments = get_args(option_type)
        if get_origin(option_type) is Sequence:
            option_type = list[type_arguments]  # type: ignore[valid-type]
        elif any(
            get_origin(union_member) is Sequence for union_member in type_arguments
        ):
            option_type = Any
        defaults: Any = {
            "default": option_field.default,
            "default_factory": option_field.default_factory,
        }
        option = field(**defaults, metadata=option_field.metadata)
        options[option_field.name] = option_type, option
    return options


def _nested(name: str, kind: Any) -> tuple[Any, Any]:
    node = _made(name, _of_dataclass(kind))
    return node, field(default_factory=node)


def _made(name: str, options: SchemaOptions) -> type:
    return make_dataclass(
        name, [(key, *type_and_field) for key, type_and_field in options.items()]
    )

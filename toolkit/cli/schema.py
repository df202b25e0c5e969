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
        group, name = "experiment" if subfolder == "." else subfolder, path.stem
        if f"schema/{group}/{name}@_here_" in path.read_text():
            options = _of_file(path)
            if name in ("train", "compare"):
                training = _of_dataclass(TrainingOptions)
                training["tracking"] = _nested("tracking", TrackingOptions)
                options = training | {
                    key: option for key, option in options.items() if key not in training
                }
            if name == "compare":
                options = {key: option for key, option in options.items() if key not in _GUARD}
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
    schema_fields = fields(kind) if is_dataclass(kind) else ()
    return {
        schema_field.name: schema_field.metadata["help"]
        for schema_field in schema_fields
        if "help" in schema_field.metadata
    }


def option_names(experiment: str) -> list[str]:
    """Return the dotted names of an experiment's options, for every choice of its groups."""
    experiment_fields = fields(schemas()["experiment"][experiment])
    names = [option_field.name for option_field in experiment_fields]
    for option in experiment_fields:
        nested = option.default_factory
        if is_dataclass(nested):
            names += [f"{option.name}.{nested_field.name}" for nested_field in fields(nested)]
    for group, nodes in schemas().items():
        is_rule_option = group == "schedule" and "rules" in names
        if group in names or is_rule_option:
            prefix = "rules.NAME" if is_rule_option else group
            field_names = {
                option_field.name for node in nodes.values() for option_field in fields(node)
            }
            names += [f"{prefix}.{name}" for name in sorted(field_names - {"_target_"})]
    return names


@cache
def _of_file(path: Path) -> SchemaOptions:
    """Return the options of a file, and of the files that it extends."""
    text = path.read_text()
    values = yaml.load(text, Loader=_Loader)
    described_options = {name: type_and_help for name, *type_and_help in _LINE.findall(text)}
    options: SchemaOptions = {}
    for entry in values.pop("defaults", ()):
        if isinstance(entry, str):
            base_file = path.parent / f"{entry}.yaml"
            options |= _of_file(base_file) if base_file.is_file() else {}
        elif not (group := next(iter(entry))).startswith("override") and group not in PRESETS:
            package = group.partition("@")[2].partition(".")[0]  # rules of schedule@rules.dp
            default = MISSING if entry[group] is not None else None
            options[package or group] = (dict[str, Any] if package else Any), field(default=default)
    values.pop("hydra", None)
    for name, value in values.items():
        declared_type, text = described_options.get(name, ("", ""))
        option_type = _DECLARED.get(declared_type, _type(value))
        options[name] = (
            option_type,
            field(default=MISSING, metadata={"help": text} if text else {}),
        )
    return options


def _type(value: Any) -> Any:
    """Return the type of an option from its default."""
    if isinstance(value, list):
        return list[type(value[0])] if value else list[Any]  # type: ignore[misc]
    return dict[str, Any] if isinstance(value, dict) else type(value)


def _of_dataclass(kind: Any) -> SchemaOptions:
    """Return the options that a dataclass describes.

    OmegaConf has no unions with sequences, so an option of such a type takes any value.
    """
    options: SchemaOptions = {}
    for option_field in fields(kind):
        if is_dataclass(option_field.type):
            options[option_field.name] = _nested(option_field.name, option_field.type)
        else:
            takes_sequence = any(
                get_origin(union_member) is Sequence for union_member in get_args(option_field.type)
            )
            is_sequence = get_origin(option_field.type) is Sequence
            defaults: Any = {
                "default": option_field.default,
                "default_factory": option_field.default_factory,
            }
            option_type = list[get_args(option_field.type)] if is_sequence else option_field.type  # type: ignore[misc]
            options[option_field.name] = (
                Any if takes_sequence else option_type,
                field(**defaults, metadata=option_field.metadata),
            )
    return options


def _nested(name: str, kind: Any) -> tuple[Any, Any]:
    node = _made(name, _of_dataclass(kind))
    return node, field(default_factory=node)


def _made(name: str, options: SchemaOptions) -> type:
    return make_dataclass(name, [(key, *type_and_field) for key, type_and_field in options.items()])

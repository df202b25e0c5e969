"""Validate options and resolve shorthands."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import inf, prod
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from toolkit.cli import schema
from toolkit.cli.explain import nearest
from toolkit.cli.help import choices, folders, groups
from toolkit.cli.hydra_args import key_of, parse, unquoted, value_of
from toolkit.cli.instantiate import plain
from toolkit.errors import UserError, suggest
from toolkit.files import conf
from toolkit.options import (
    OWN,
    SaveOptions,
    SwitchOptions,
    TrackingOptions,
    TrainingOptions,
)
from toolkit.schedule import Schedule
from toolkit.terminal import show_import

_THREADS_PER_CPU = 16  # far more end the process
_SAME = ("workers", "microbatches")
_SIZES = ("ranks", "stages", "microbatches", "steps")
_FOLDERS = ("hydra.run.dir", "hydra.sweep.dir")
_MAX_OPS = 1_000_000  # of a training step


def check_counts(config: Mapping[Any, Any], *names: str, of: str = "") -> None:
    """Raise UserError if a count, or one of a list, is below 1; ``of`` is a prefix of the names."""
    for name in names:
        counts(config, name, of)


def counts(config: Mapping[Any, Any], name: str, of: str = "") -> list[int]:
    """Return an option that is a count or a list of counts, as a list.

    Raises:
        UserError: it is empty, or contains anything but whole numbers above 0.
    """
    option_value = config[name]
    values = [option_value]
    if isinstance(option_value, Sequence) and not isinstance(option_value, str):
        values = list(option_value)
    # By `type`, since True is an int for isinstance.
    if not values or not all(type(value) is int and value > 0 for value in values):
        raise UserError(f"{of}{name} is a whole number, 1 or more: got {option_value}")
    return values


def check_own(config: Mapping[Any, Any]) -> None:
    """Validate ``own``, the options of single rules of a comparison.

    Raises:
        UserError: there is no such rule or option, or all rules share it.
    """
    for rule, options in config["own"].items():
        if rule not in config["rules"]:
            raise UserError(
                f"own.{rule} has options of a rule that is not compared: got {rule}, with the rules"
                f" {', '.join(config['rules'])}; leave it out (~own.{rule}), or add the rule"
            )
        for name, value in (options or {}).items():
            if name not in OWN:
                raise UserError(
                    f"own.{rule}.{name}: rules differ in {', '.join(OWN)} and their schedules, and"
                    f" share all else; got {name}. Compare it in a sweep of train"
                )
            # With a `_target_` the group is another choice, whose options are its own.
            if isinstance(value, Mapping) and "_target_" not in value:
                option_names = [*map(str, config[name])]
                for key in map(str, value):
                    if key not in option_names:
                        raise UserError(
                            f"own.{rule}.{name}.{key}: there is no option {name}.{key} here:"
                            f" {suggest(key, option_names)}"
                        )


def check_training(config: DictConfig) -> TrainingOptions:
    """Return the plain options of a training run; torch is not imported.

    Raises:
        UserError: a value is out of range.
    """
    learning_rate = config.optimizer.get("lr", 0)
    is_number = isinstance(learning_rate, int | float) and not isinstance(
        learning_rate, bool
    )
    if not is_number or not 0 <= learning_rate < inf:
        raise UserError(f"optimizer.lr is a number, 0 or more: got {learning_rate!r}")
    options = plain(config)
    if "tracking" in options:
        TrackingOptions(**options["tracking"])
    nested = {"save": SaveOptions, "switch": SwitchOptions}
    names = {field.name for field in fields(TrainingOptions)}
    values = {name: value for name, value in options.items() if name in names}
    return TrainingOptions(
        **values
        | {name: option_class(**options[name]) for name, option_class in nested.items()}
    )


def check_compressed(
    schedules: "Mapping[str, Schedule]", compression: str, width: int
) -> None:
    """Raise UserError if a compression by codes does not suit the messages of a schedule."""
    from toolkit.cost.compression import MESSAGE_CODES
    from toolkit.runtime.rank_compression import check_handed_on

    # Codes are for gradients that ranks hand on to one another.
    if compression in MESSAGE_CODES:
        if width > 1:
            raise UserError(
                f"width={width} takes no compression={compression}: use bf16"
            )
        for schedule in schedules.values():
            check_handed_on(schedule, MESSAGE_CODES[compression])


def check_given(experiment: str, arguments: Sequence[str]) -> None:
    """Validate a command line before Hydra composes it.

    Args:
        experiment: name of the experiment.
        arguments: flags and options.

    Raises:
        UserError: it names an unknown choice of a group or no output folder, or gives a size twice.
    """
    config_folders, group_names = folders(arguments), groups(conf())
    argument_of_option = {
        key_of(argument): argument for argument in parse(arguments).overrides
    }
    for key, argument in argument_of_option.items():
        group = key.partition("@")[0]
        if not key:
            raise UserError(f"{argument!r} is not OPTION=VALUE")
        if key in _FOLDERS and not unquoted(value_of(argument)):
            raise UserError(
                f"{argument} names no folder: give one, such as {key}=outputs/mine"
            )
        if group in group_names and "=" in argument:
            _check_choice(argument, choices(config_folders, group))
    if all(name in argument_of_option for name in _SAME):
        size_pair = " and ".join(
            argument_of_option[name] for name in argument_of_option if name in _SAME
        )
        raise UserError(
            f"{size_pair}: workers sets microbatches, so leave one of them out"
        )
    # Elsewhere Hydra says that there is no such option.
    if "schedule.file" in schema.option_names(experiment):
        _check_sizes_of_file(argument_of_option)


def _check_sizes_of_file(argument_of_option: Mapping[str, str]) -> None:
    """Raise UserError if ``schedule.file`` has company that sets the sizes of its schedule.

    Args:
        argument_of_option: the options of a command line by name, as they are written.
    """
    file = argument_of_option.get("schedule.file", "=null")
    compares_schedules = any(
        name.startswith("schedule@also.") for name in argument_of_option
    )
    # Other schedules of the table take their sizes from the other options.
    size_options = ["schedule.n_ranks"]
    if not compares_schedules:
        size_options += [*_SAME, "stages"]
    size_arguments = [
        argument_of_option[name] for name in size_options if name in argument_of_option
    ]
    if size_arguments and value_of(file) not in ("null", ""):
        raise UserError(
            f"{' '.join(size_arguments)}: {file} has its own stages, micro-batches and ranks, so"
            " leave that out"
        )


def _check_choice(argument: str, group_choices: list[str]) -> None:
    """Raise UserError if ``GROUP=CHOICE`` names a choice that the group does not have."""
    value = unquoted(value_of(argument))
    if "(" in value:  # Hydra's functions, in sweeps
        return
    for choice in value.split(","):
        if choice.strip() not in group_choices:
            target_hint = ""
            if choice == "null":
                target_hint = f"; without {key_of(argument)}= it is the default"
            if key_of(argument) == "model":
                target_hint = "; model.target=PACKAGE.FUNCTION is your own"
            raise UserError(
                f"{key_of(argument)}={choice} is unknown:"
                f" {suggest(choice.strip(), group_choices)}{target_hint}"
            )


def resolve_options(config: DictConfig, options: Sequence[str]) -> None:
    """Resolve shorthands and interpolations, validate the options, and use ``threads``.

    Presets do not overrule ``options``, those of the command line. ``schedule.file`` has no
    delay, unless one, or a ``schedule`` that has one, is among them.

    Raises:
        UserError: the seed or threads are impossible, or an option does not exist.
    """
    option_names = {key_of(option) for option in options}
    if "schedule.file" in option_names and not option_names & {
        "schedule",
        "schedule.delay",
    }:
        config.schedule.delay = 0
    if config.get("workers") is not None and "microbatches" in config:
        # The command line counts more than a preset, and `workers` would overrule it.
        if "microbatches" in option_names:
            config.workers = None  # of a preset
        else:
            check_counts(config, "workers")
            config.microbatches = config.workers
    # After the shorthands, so that ${microbatches} has the value that workers gives.
    OmegaConf.resolve(config)
    _check_known(config)
    _check_size(config)
    if "epochs" in config:
        check_training(config)
    if not 0 <= config.get("seed", 0) < 2**63:
        raise UserError(f"seed is 0 or more, and below 2**63: got {config.seed}")
    threads, max_threads = (
        config.get("threads"),
        _THREADS_PER_CPU * (os.cpu_count() or 1),
    )
    if threads is not None:
        if not 1 <= threads <= max_threads:
            raise UserError(f"threads is from 1 to {max_threads} here: got {threads}")
        show_import()
        import torch

        torch.set_num_threads(threads)


def _check_size(config: DictConfig) -> None:
    """Reject sizes whose schedule would take more than minutes to build."""
    schedule = config.get("schedule") or {}
    size_options = {name: config.get(name) for name in _SIZES}
    if "microbatches" not in config:  # which workers set, where there are both
        size_options["workers"] = config.get("workers")
    size_options |= {
        f"schedule.{name}": schedule.get(name) for name in ("accumulate", "n_ranks")
    }
    largest_sizes: dict[str, int] = {}
    # Sweeps and tables have lists of sizes; the largest of each decides.
    for name, values in size_options.items():
        if not isinstance(values, ListConfig):
            values = [values]
        largest_size = max((size for size in values if type(size) is int), default=1)
        if largest_size > 1:
            largest_sizes[name] = largest_size
    if prod(largest_sizes.values()) > _MAX_OPS:
        product_text = " and ".join(
            f"{name}={size}" for name, size in largest_sizes.items()
        )
        raise UserError(
            f"{product_text}: their product is at most {_MAX_OPS}: choose smaller ones"
        )


def _check_known(config: DictConfig, group: str = "") -> None:
    """Reject options, added by ``+``, that no schema has; a ``_target_`` checks its own."""
    # Hydra lets `+name=value` add any option, so a misspelt one would be ignored.
    schema_class = OmegaConf.get_type(config)
    if ("_target_" in config and group != "runtime.") or not is_dataclass(schema_class):
        return
    schema_options = [f"{group}{field.name}" for field in fields(schema_class)]
    for name in map(str, config):
        option = f"{group}{name}"
        if option not in schema_options:
            raise UserError(
                f"+{option}: there is no option {option}: {nearest(option, schema_options)}"
            )
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            _check_known(config[name], f"{option}.")

"""Validation of options, and options that stand for others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from toolkit.cli.errors import nearest
from toolkit.cli.help import choices, folders, groups
from toolkit.cli.hydra_args import key_of, parse, unquoted, value_of
from toolkit.errors import UserError, suggest
from toolkit.files import conf
from toolkit.options import OWN

_THREADS_PER_CPU = 16  # far more end the process
_SAME = ("workers", "microbatches")
_SIZES = ("ranks", "stages", "microbatches", "steps")
_MOST_OPS = 1_000_000  # of a training step


def check_counts(config: Mapping[Any, Any], *names: str, of: str = "") -> None:
    """Raise UserError if a count, or one of a list, is below 1; ``of`` is a prefix of the names."""
    for name in names:
        counts(config, name, of)


def counts(config: Mapping[Any, Any], name: str, of: str = "") -> list[int]:
    """Return an option that is a count or a list of counts, as a list.

    Raises:
        UserError: it is empty, or contains anything but whole numbers above 0.
    """
    given = config[name]
    found = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not found or not all(type(n) is int and n > 0 for n in found):
        raise UserError(f"{of}{name} is a whole number, 1 or more: got {given}")
    return found


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
            if isinstance(value, Mapping) and "_target_" not in value:
                known = [*map(str, config[name])]
                for key in map(str, value):
                    if key not in known:
                        raise UserError(
                            f"own.{rule}.{name}.{key}: there is no option {name}.{key} here:"
                            f" {suggest(key, known)}"
                        )


def check_given(arguments: Sequence[str]) -> None:
    """Validate a command line before Hydra composes it.

    Raises:
        UserError: it names an unknown choice of a group, or gives a size twice.
    """
    found, known = folders(arguments), groups(conf())
    options = {key_of(argument): argument for argument in parse(arguments).overrides}
    for key, argument in options.items():
        group = key.partition("@")[0]
        if not key:
            raise UserError(f"{argument!r} is not OPTION=VALUE")
        if group in known and "=" in argument:
            _check_choice(argument, choices(found, group))
    if all(name in options for name in _SAME):
        both = " and ".join(options[name] for name in options if name in _SAME)
        raise UserError(f"{both}: workers sets microbatches, so leave one of them out")
    file = options.get("schedule.file", "=null")
    others = any(name.startswith("schedule@also.") for name in options)
    sizes = ["schedule.n_ranks", *(() if others else (*_SAME, "stages"))]
    given = [options[name] for name in sizes if name in options]
    if given and value_of(file) not in ("null", ""):
        raise UserError(
            f"{' '.join(given)}: {file} has its own stages, micro-batches and ranks, so leave that"
            " out"
        )


def _check_choice(argument: str, known: list[str]) -> None:
    value = unquoted(value_of(argument))
    if "(" in value:  # Hydra's functions, in sweeps
        return
    for choice in value.split(","):
        if choice.strip() not in known:
            own = "; model.target=PACKAGE.FUNCTION is your own" * (key_of(argument) == "model")
            raise UserError(
                f"{key_of(argument)}={choice} is unknown: {suggest(choice.strip(), known)}{own}"
            )


def resolve_options(config: DictConfig, given: Sequence[str]) -> None:
    """Resolve shorthands and interpolations, validate the options, and use ``threads``.

    Presets do not overrule options that are ``given`` on the command line. ``schedule.file`` has no
    delay, unless one, or a ``schedule`` that has one, is given too.

    Raises:
        UserError: the seed or threads are impossible, or an option does not exist.
    """
    names = {*map(key_of, given)}
    if "schedule.file" in names and not names & {"schedule", "schedule.delay"}:
        config.schedule.delay = 0
    if config.get("workers") is not None and "microbatches" in config:
        if "microbatches" in names:
            config.workers = None  # of a preset
        else:
            check_counts(config, "workers")
            config.microbatches = config.workers
    OmegaConf.resolve(config)
    _check_known(config)
    _check_size(config)
    if not 0 <= config.get("seed", 0) < 2**63:
        raise UserError(f"seed is 0 or more, and below 2**63: got {config.seed}")
    threads, most = config.get("threads"), _THREADS_PER_CPU * (os.cpu_count() or 1)
    if threads is not None:
        if not 1 <= threads <= most:
            raise UserError(f"threads is from 1 to {most} here: got {threads}")
        import torch

        torch.set_num_threads(threads)


def _check_size(config: DictConfig) -> None:
    """Refuse more ops of a training step than a schedule can be made of within minutes."""
    schedule = config.get("schedule") or {}
    given = {name: config.get(name) for name in _SIZES}
    if "microbatches" not in config:  # which workers set, where there are both
        given["workers"] = config.get("workers")
    given |= {f"schedule.{name}": schedule.get(name) for name in ("accumulate", "n_ranks")}
    lists = {name: v if isinstance(v, ListConfig) else [v] for name, v in given.items()}
    sizes = {k: max((n for n in v if type(n) is int), default=1) for k, v in lists.items()}
    sizes = {name: n for name, n in sizes.items() if n > 1}
    if prod(sizes.values()) > _MOST_OPS:
        shown = " and ".join(f"{name}={n}" for name, n in sizes.items())
        raise UserError(f"{shown}: their product is at most {_MOST_OPS}: choose smaller ones")


def _check_known(config: DictConfig, group: str = "") -> None:
    """Reject options, added by ``+``, that no schema has; a ``_target_`` checks its own."""
    kind = OmegaConf.get_type(config)
    if ("_target_" in config and group != "runtime.") or not is_dataclass(kind):
        return
    known = [f"{group}{field.name}" for field in fields(kind)]
    for name in map(str, config):
        option = f"{group}{name}"
        if option not in known:
            raise UserError(f"+{option}: there is no option {option}: {nearest(option, known)}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            _check_known(config[name], f"{option}.")

"""Validation of options, and options that stand for others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli.hydra_args import key_of
from toolkit.errors import UserError

_THREADS_PER_CPU = 16  # far more end the process
_SAME = ("workers", "microbatches")


def check_counts(config: Mapping[Any, Any], *names: str, of: str = "") -> None:
    """Reject options that are below 1.

    Args:
        config: the options.
        names: the options to check.
        of: prefix of their names on the command line.

    Raises:
        UserError: an option is below 1.
    """
    for name in names:
        if config[name] < 1:
            raise UserError(f"{of}{name} is 1 or more: got {config[name]}")


def counts(config: Mapping[Any, Any], name: str) -> list[int]:
    """Return an option that is a count or a list of counts, as a list.

    Raises:
        UserError: it is empty, or contains anything but whole numbers above 0.
    """
    given = config[name]
    found = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not found or not all(type(n) is int and n > 0 for n in found):
        raise UserError(f"{name} is a list of whole numbers above 0: got {found}")
    return found


def check_known(config: DictConfig, group: str = "") -> None:
    """Reject options, added by ``+``, that no schema has; ``group`` is the prefix of their names.

    Arguments of a ``_target_`` are left to the function that takes them.

    Raises:
        UserError: an option does not exist.
    """
    kind = OmegaConf.get_type(config)
    if "_target_" in config or not is_dataclass(kind):
        return
    known = [field.name for field in fields(kind)]
    for name in map(str, config):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {group}{near[0]}?" if near else "--help lists the options"
            raise UserError(f"+{group}{name}: there is no option {group}{name}: {hint}")
        if not OmegaConf.is_missing(config, name) and OmegaConf.is_dict(config[name]):
            check_known(config[name], f"{group}{name}.")


def resolve_options(config: DictConfig, given: Sequence[str]) -> None:
    """Resolve shorthands and interpolations, and validate the options.

    Args:
        config: of an experiment; changed in place.
        given: options on the command line, which presets must not overrule. A schedule file reads
            fresh weights unless a delay, or a ``schedule`` that has one, is given too.

    Raises:
        UserError: the seed or the workers are impossible, or an option does not exist.
    """
    sizes = [option for option in given if key_of(option) == "microbatches"]
    if sizes and (workers := config.get("workers")) is not None:
        raise UserError(
            f"{sizes[0]}, and a preset has workers={workers}, which sets microbatches: give workers"
            " instead"
        )
    _read_fresh(config, given)
    if config.get("workers") is not None and "microbatches" in config:
        config.microbatches = config.workers
    OmegaConf.resolve(config)
    check_known(config)
    if not 0 <= config.get("seed", 0) < 2**63:
        raise UserError(f"seed is 0 or more, and below 2**63: got {config.seed}")


def _read_fresh(config: DictConfig, given: Sequence[str]) -> None:
    """Set delay=0 in schedules from files, unless a delay is given."""
    names = {key_of(option) for option in given}
    more = [f"{group}.{name}" for group in ("rules", "also") for name in config.get(group) or {}]
    for group in ("schedule", *more):
        late = {f"{group}.delay", "schedule"}  # a rule always names some method
        fresh = f"{group}.file" in names and not names & late
        if fresh and "delay" in (options := OmegaConf.select(config, group)):
            options.delay = 0  # the delay of the default method does not apply to a file


def check_given(arguments: Sequence[str]) -> None:
    """Reject a command line that gives one size twice.

    Raises:
        UserError: it gives ``workers`` and ``microbatches``, or sizes although a schedule file
            has its own, unless other schedules are compared with it.
    """
    options = {key_of(argument): argument for argument in arguments}
    if all(name in options for name in _SAME):
        both = " and ".join(options[name] for name in options if name in _SAME)
        raise UserError(f"{both}: workers sets microbatches, so leave one of them out")
    file = options.get("schedule.file", "=null")
    others = any(name.startswith("schedule@also.") for name in options)
    of_a_file = ("schedule.n_ranks", *(() if others else (*_SAME, "stages")))
    if file.partition("=")[2] not in ("null", "") and (
        sizes := [options[n] for n in of_a_file if n in options]
    ):
        raise UserError(
            f"{' '.join(sizes)}: {file} has its own stages, micro-batches and ranks, so leave that"
            " out"
        )


def use_threads(config: DictConfig) -> None:
    """Set the number of torch's CPU threads.

    Raises:
        UserError: ``config.threads`` is out of range.
    """
    threads, most = config.get("threads"), _THREADS_PER_CPU * (os.cpu_count() or 1)
    if threads is not None:
        if not 1 <= threads <= most:
            raise UserError(f"threads is from 1 to {most} here: got {threads}")
        import torch

        torch.set_num_threads(threads)

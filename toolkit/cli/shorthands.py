"""Options that stand for others."""

import os
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from toolkit.cli.hydra_args import key_of
from toolkit.cli.validate import check_known
from toolkit.errors import UserError

_THREADS_PER_CPU = 16  # far more end the process
_SAME = ("workers", "microbatches")
_SIZES = (*_SAME, "stages")


def spell_out(config: Any) -> None:
    """Give ``workers``, where one is chosen, to what it is short for.

    Args:
        config: of an experiment; changed in place.
    """
    if config.get("workers") is not None and "microbatches" in config:
        config["microbatches"] = config["workers"]


def settle(config: DictConfig, given: Sequence[str]) -> None:
    """Spell out and resolve options.

    Args:
        config: of an experiment; changed in place.
        given: on the command line, which presets must not overrule. A schedule file that is given
            reads fresh weights, unless a delay, or ``schedule`` by a method that has one, is given,
            too.

    Raises:
        ValueError: the seed or the workers cannot be, or there is no such option.
    """
    _check_workers(config, given)
    _read_fresh(config, given)
    spell_out(config)
    OmegaConf.resolve(config)
    check_known(config)
    _check_seed(config)


def _check_workers(config: DictConfig, given: Sequence[str]) -> None:
    workers = config.get("workers")
    told = [option for option in given if key_of(option) == "microbatches"]
    if told and workers is not None:
        raise UserError(
            f"{told[0]}, and a preset has workers={workers}, which sets microbatches: give workers"
            " instead"
        )


def _read_fresh(config: DictConfig, given: Sequence[str]) -> None:
    """Have schedules from files read fresh weights, where no delay is given."""
    names = {key_of(option) for option in given}
    for group in _schedules(config):
        late = {f"{group}.delay", "schedule"}  # a rule has to be of some method
        fresh = f"{group}.file" in names and not names & late
        if fresh and "delay" in (options := OmegaConf.select(config, group)):
            options.delay = 0  # that of the usual method is no word on a file


def _schedules(config: DictConfig) -> list[str]:
    """The groups of options that are a schedule's."""
    more = [f"{group}.{name}" for group in ("rules", "also") for name in config.get(group) or {}]
    return ["schedule", *more]


def _check_seed(config: DictConfig) -> None:
    if not 0 <= config.get("seed", 0) < 2**63:
        raise UserError(f"seed is 0 or more, and below 2**63: got {config.seed}")


def check_given(arguments: Sequence[str]) -> None:
    """Refuse a command line that says the same thing twice.

    Raises:
        ValueError: it gives ``workers`` and ``microbatches``, or a size with a file that has its
            own, and nothing beside it has not.
    """
    options = {key_of(argument): argument for argument in arguments}
    if all(name in options for name in _SAME):
        both = " and ".join(options[name] for name in options if name in _SAME)
        raise UserError(f"{both}: workers sets microbatches, so leave one of them out")
    file = options.get("schedule.file", "=null")
    others = any(name.startswith("schedule@also.") for name in options)
    of_a_file = ("schedule.n_ranks", *(() if others else _SIZES))
    if file.partition("=")[2] not in ("null", "") and (
        sizes := [options[n] for n in of_a_file if n in options]
    ):
        raise UserError(
            f"{' '.join(sizes)}: {file} has its own stages, micro-batches and ranks, so leave that"
            " out"
        )


def use_threads(config: DictConfig) -> None:
    """Have torch use as many as ``config`` gives it.

    Raises:
        ValueError: there cannot be as many.
    """
    threads, most = config.get("threads"), _THREADS_PER_CPU * (os.cpu_count() or 1)
    if threads is not None:
        if not 1 <= threads <= most:
            raise UserError(f"threads is from 1 to {most} here: got {threads}")
        import torch

        torch.set_num_threads(threads)

"""From options to the objects that they describe."""

import importlib
import os
import sys
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.schedule import RandomDelay, Schedule

if TYPE_CHECKING:
    from torch import nn


_OF_METHODS = {"placement": "per_microbatch", "chains": "in_order", "accumulate": 1}


def build_schedule(config: DictConfig) -> Schedule:
    """The schedule of a group's options: a named method, or rank orders from a file.

    Raises:
        ValueError: an impossible schedule, or a file that holds none.
    """
    options: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    file = options.pop("file", None)
    late = {}
    if "delay" in options:
        late["delay"] = _delay(options.pop("delay"))
    if file is not None:
        return _from_file(Path(file), options, late)
    schedule: Schedule = instantiate(options, _partial_=True)(**late)
    return schedule


def _from_file(path: Path, options: dict[str, Any], late: dict[str, Any]) -> Schedule:
    """Rank orders, with the group's options that are not of what runs where."""
    for name, usual in _OF_METHODS.items():
        if (value := options.get(name, usual)) != usual:
            raise ValueError(
                f"schedule.{name}={value} is of a named method, and a file's orders say themselves"
                f" what runs where: leave it out, or leave out schedule.file"
            )
    free = {name: options[name] for name in ("state", "predict") if name in options}
    return Schedule.from_csv(path, name=path.stem, **free, **late)


def _delay(value: Any) -> Any:
    """A delay of a schedule's options; one that has options of its own is random."""
    if not isinstance(value, dict):
        return value
    known = [field.name for field in fields(RandomDelay)]
    for name in map(str, value):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"a random delay has no {name!r}: {hint}it has {', '.join(known)}")
    return RandomDelay(**value)


def build_model(
    config: DictConfig, n_classes: int, image_size: int, in_channels: int
) -> "nn.Module":
    """The model of a group's options: a named one, or the user's own.

    Raises:
        ValueError: there is no such model, or it cannot be built.
    """
    if config.get("target") is not None:
        return _own_model(config.target, dict(config.arguments))
    options = {name: config[name] for name in config if name not in ("target", "arguments")}
    model: nn.Module = instantiate(
        options, n_classes=n_classes, image_size=image_size, in_channels=in_channels
    )
    return model


def image_shape(shape: list[int]) -> tuple[int, int, int]:
    """Channels, height and width.

    Raises:
        ValueError: they are something else.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"shape is channels, height, width, such as [3,224,224]: got {shape}")
    channels, height, width = shape
    return channels, height, width


def _own_model(target: str, arguments: dict[str, Any]) -> "nn.Module":
    from torch import nn

    module, _, name = target.rpartition(".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model.target={target} cannot be imported ({error}): give package.module.function,"
            " from the current folder or an installed package"
        ) from error
    try:
        model = make(**arguments)
    except Exception as error:  # the user's own code, which may raise anything
        raise ValueError(
            f"{target} cannot be called: {type(error).__name__}: {error}; its arguments are"
            " model.arguments (+model.arguments.NAME=VALUE)"
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{target} gives a {type(model).__name__}: expected a torch.nn.Module, or a function"
            " that returns one"
        )
    return model

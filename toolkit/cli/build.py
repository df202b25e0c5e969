"""From options to the objects that they describe."""

import importlib
import os
import sys
from dataclasses import fields
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.cli.validate import check_counts
from toolkit.errors import UserError
from toolkit.schedule import RandomDelay, Schedule

if TYPE_CHECKING:
    from torch import nn

    from toolkit.model import InputSpec


_OF_METHODS = {"placement": "per_microbatch", "chains": "in_order", "accumulate": 1}


def build_schedule(config: DictConfig) -> Schedule:
    """The schedule of a group's options: a named method, or rank orders from a file.

    Raises:
        ValueError: an impossible schedule, or a file that holds none.
    """
    if not OmegaConf.is_dict(config):
        raise UserError(
            f"{config} is no schedule but the name of one: to add it, choose it in its group, as in"
            f" +schedule@rules.{config}={config} (of simulate, +schedule@also.{config}={config})"
        )
    options: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    file, period = options.pop("file", None), options.pop("period", None)
    late = {}
    if "delay" in options:
        late["delay"] = _delay(options.pop("delay"))
    if file == "":
        raise UserError("schedule.file is empty: give a CSV file of rank orders, or null")
    if file is not None:
        return _from_file(Path(file), options, {**late, "period": period})
    if period is not None:
        raise UserError(
            f"schedule.period={period} is of a file's orders, and a named method has its own: leave"
            " it out, or give schedule.file"
        )
    check_target(config, "schedule", "toolkit.schedule.catalog.cyclic")
    schedule = instantiate(options, _partial_=True)(**late)
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"schedule: {config._target_} gives a {type(schedule).__name__}, and a schedule is a"
            " toolkit.schedule.Schedule, such as toolkit.schedule.catalog makes"
        )
    return schedule


def _from_file(path: Path, options: dict[str, Any], when: dict[str, Any]) -> Schedule:
    """Rank orders, with the group's options that are not of what runs where."""
    for name, usual in _OF_METHODS.items():
        if (value := options.get(name, usual)) != usual:
            raise UserError(
                f"schedule.{name}={value} is of a named method, and a file's orders say themselves"
                f" what runs where: leave it out, or leave out schedule.file"
            )
    free = {name: options[name] for name in ("state", "predict") if name in options}
    return Schedule.from_csv(path, name=path.stem, **free, **when)


def _delay(value: Any) -> Any:
    """A delay of a schedule's options; one that has options of its own is random."""
    if not isinstance(value, dict):
        return value
    known = [field.name for field in fields(RandomDelay)]
    for name in map(str, value):
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise UserError(f"a random delay has no {name!r}: {hint}it has {', '.join(known)}")
    return RandomDelay(**value)


def build_model(config: DictConfig, form: "InputSpec") -> "nn.Module":
    """The model of a group's options, for samples of ``form``: a named one, or the user's own.

    Raises:
        ValueError: there is no such model, it takes other samples, or it cannot be built.
    """
    if config.get("target") is not None:
        return _own_model(config.target, dict(config.arguments))
    told = _told(config)
    if told is not None and (lacking := form.arguments.keys() - told):
        if not config._target_.startswith("toolkit."):
            raise UserError(
                f"_target_: {config._target_} takes no {', '.join(sorted(lacking))}, which a"
                f" _target_ of a model is told: write target: {config._target_} in its file, and"
                " what it takes below arguments"
            )
        raise UserError(
            f"model={model_name(config)} takes no {form.samples}, for it has no"
            f" {', '.join(sorted(lacking))}: choose other data (where a model is analysed, another"
            f" shape), or another model, such as {_SUCH_AS[form.samples]}"
        )
    not_told = {"target", "arguments"} | ({"name"} - told if told is not None else set())
    options = {name: config[name] for name in config if name not in not_told}
    model: nn.Module = instantiate(options, **form.arguments)
    return model


_SUCH_AS = {"images": "resnet18", "sequences": "gpt"}


def model_name(config: DictConfig) -> str:
    """What the model of a group's options is called."""
    return str(config.get("target") or config.get("name") or config._target_.rpartition(".")[2])


def _told(config: DictConfig) -> set[str] | None:
    """What the function that makes a named model can be told; None: anything."""
    look_here()
    parameters = signature(get_method(config._target_)).parameters
    anything = any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    return None if anything else {*parameters}


def analysed_form(config: DictConfig) -> "InputSpec":
    """The samples for which a model is analysed: the ``shape`` of one, and ``classes``.

    Raises:
        ValueError: there are no such samples.
    """
    from toolkit.model import Images, Sequences

    own = config.model.get("target") is not None
    of_sequences = not own and "length" in (_told(config.model) or ())
    shape = config.shape
    if shape is None:
        shape = [1024] if of_sequences else [3, 224, 224]
    if len(shape) not in (1, 3) or min(shape) < 1:
        raise UserError(
            "shape is channels, height, width of an image, such as [3,224,224], or the tokens of a"
            f" sequence, such as [1024]: got {shape}"
        )
    if config.classes is not None:
        check_counts(config, "classes")
    if len(shape) == 1:
        return Sequences(shape[0], config.classes or 50257)
    channels, height, width = shape
    return Images(channels, height, width, config.classes or 1000)


def look_here() -> None:
    """Find modules of the user's own in the current folder, too."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def check_target(config: DictConfig, group: str, such_as: str) -> None:
    """Refuse, as a ValueError, a choice of the user's own that does not tell what it makes."""
    if config.get("_target_") is None:
        raise UserError(
            f"this choice of {group} has no _target_: add to its file what makes it, such as"
            f" _target_: {such_as}"
        )


def build_hardware(config: DictConfig) -> Any:
    """The machine that ``config`` tells.

    Raises:
        ValueError: it tells none, or one that cannot be.
    """
    check_target(config, "hardware", "toolkit.cost.Hardware")
    return instantiate(config)


def _own_model(target: str, arguments: dict[str, Any]) -> "nn.Module":
    from torch import nn

    module, _, name = target.rpartition(".")
    look_here()
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.target={target} cannot be imported ({error}): give package.module.function,"
            " from the current folder or an installed package"
        ) from error
    try:
        model = make(**arguments)
    except Exception as error:  # the user's own code, which may raise anything
        raise UserError(
            f"{target} cannot be called: {type(error).__name__}: {error}; its arguments are"
            " model.arguments (+model.arguments.NAME=VALUE)"
        ) from error
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{target} gives a {type(model).__name__}: expected a torch.nn.Module, or a function"
            " that returns one"
        )
    return model

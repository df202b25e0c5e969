"""Build what a group of options describes: samples, a schedule, a model or hardware."""

import os
import sys
from collections.abc import Sequence
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from hydra.utils import get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.cli.check_options import check_counts
from toolkit.errors import UserError
from toolkit.schedule import Correction, RandomDelay, Schedule, ScheduleSpec, labels
from toolkit.schedule.plain_options import (
    OF_FILES,
    check_file_options,
    from_mapping,
    is_of_catalogue,
)
from toolkit.schedule.spec_phases import with_phases

if TYPE_CHECKING:
    from torch import nn

    from toolkit.cost import Hardware
    from toolkit.model import InputSpec
    from toolkit.training.data import SampleSet


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as nested dicts and lists."""
    options: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return options


def load_samples(config: DictConfig) -> "SampleSet":
    """Load the samples that options of the group ``data`` describe.

    Args:
        config: options of the group, with a ``_target_`` and its arguments.

    Returns:
        samples for training and for the test.

    Raises:
        UserError: the ``_target_`` does not return a set of samples, or refuses its arguments.
    """
    samples: SampleSet = make(config, "data", "toolkit.training.data.digits")
    if not all(hasattr(samples, name) for name in ("form", "train", "test")):
        raise UserError(
            f"data: {config._target_} gives a {type(samples).__name__}; expected a set with form,"
            " train() and test(), such as toolkit.training.data.Datasets (see conf/README.md)"
        )
    return samples


def build_schedule(config: DictConfig) -> Schedule:
    """Build a named method, or rank orders from a file, from options of the group ``schedule``.

    Args:
        config: options of the group; ``file`` names a CSV file of rank orders, or is null.

    Raises:
        UserError: an impossible schedule, or a file without rank orders.
    """
    if not OmegaConf.is_dict(config):
        raise UserError(
            f"{config} is the name of a schedule, not its options: choose it in its group, as in"
            f" +schedule@rules.{config}={config} (for simulate, +schedule@also.{config}={config})"
        )
    options = plain(config)
    if options.get("file") is not None or is_of_catalogue(options):
        return ScheduleSpec.from_config(options).build()
    check_file_options(options)
    phases = options.pop("phases", None) or []
    arguments = {name: value for name, value in options.items() if name not in OF_FILES}
    described = {"delay": RandomDelay, "correction": Correction}
    objects = {
        name: from_mapping(arguments.pop(name), described_class)
        for name, described_class in described.items()
        if name in arguments
    }
    as_factory = {"_partial_": True, "_convert_": "all"}
    factory = make(arguments, "schedule", "toolkit.schedule.catalog.cyclic", **as_factory)
    schedule = factory(**objects)
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"schedule: {config._target_} gives a {type(schedule).__name__}; expected a"
            " toolkit.schedule.Schedule, such as toolkit.schedule.catalog makes"
        )
    return with_phases(schedule, phases)


def build_schedules(config: DictConfig) -> dict[str, Schedule]:
    """Build the schedule of ``config`` and those of ``also``, by labels that tell them apart.

    Args:
        config: options of an experiment, with the groups ``schedule`` and ``also``.

    Raises:
        UserError: one is impossible, or ``also`` has another ``schedule``.
    """
    if "schedule" in config.also:
        raise UserError("also.schedule is the name of the first schedule: choose another")
    schedule_of_key = {"schedule": build_schedule(config.schedule)}
    schedule_of_key |= {
        str(name): build_schedule(schedule) for name, schedule in config.also.items()
    }
    label_of_key = labels({name: schedule.name for name, schedule in schedule_of_key.items()})
    return {label_of_key[name]: schedule for name, schedule in schedule_of_key.items()}


def build_model(config: DictConfig, form: "InputSpec") -> "nn.Module":
    """Build the model of a group's options: a named one, or the user's.

    Args:
        config: options of the group ``model``.
        form: shape of the samples and of the answers.

    Raises:
        UserError: there is no such model, it takes other samples, or it cannot be built.
    """
    from torch import nn

    target = config.get("target")
    if target is None:
        options = _named(config, form)
        form_arguments = form.arguments
    else:
        options = {"_target_": target, **config.arguments}
        form_arguments = {}
    model = make(options, "model", "toolkit.model.build", **form_arguments)
    if not isinstance(model, nn.Module):
        raise UserError(
            f"{options['_target_']} gives a {type(model).__name__}: expected a torch.nn.Module, or"
            " a function that returns one"
        )
    return model


def _named(config: DictConfig, form: "InputSpec") -> dict[str, Any]:
    """Return the options of a catalogue model; raise UserError if it does not take ``form``."""
    excluded_options = {"target", "arguments"}
    parameters = _parameters(config)
    if parameters is not None:
        excluded_options |= {"name"} - parameters
        missing_arguments = sorted(form.arguments.keys() - parameters)
        if missing_arguments:
            example = {"images": "resnet18"}.get(form.samples, "gpt")
            raise UserError(
                f"model={model_name(config)} takes no {form.samples}, since {config._target_} has"
                f" no {', '.join(missing_arguments)}: choose other data (or shape), or another"
                f" model, such as {example}; in a file of your own, write target instead of"
                " _target_"
            )
    return {str(name): config[name] for name in config if name not in excluded_options}


def model_name(config: DictConfig) -> str:
    """Return the name of a model: the user's ``target``, or the name in the catalogue.

    Args:
        config: options of the group ``model``.
    """
    return str(config.get("target") or config.get("name") or config._target_.rpartition(".")[2])


def _parameters(config: DictConfig) -> set[str] | None:
    """Return the parameters of the function that builds a model; None if it takes any."""
    _look_here()
    function = get_method(config._target_)
    try:
        parameters = signature(function).parameters
    except ValueError:  # of some functions of C
        return None
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {*parameters}


def analysed_form(config: DictConfig) -> "InputSpec":
    """Return the form of the samples for which a model is analysed.

    Args:
        config: options of experiments/memory.py or simulate.py: ``model``, ``shape``, ``classes``.

    Raises:
        UserError: an impossible shape or number of classes.
    """
    from toolkit.model import Images, Sequences

    is_user_model = config.model.get("target") is not None
    is_language_model = not is_user_model and "length" in (_parameters(config.model) or ())
    shape = config.shape
    if shape is None and is_language_model:
        shape = [1024]
    elif shape is None:
        shape = [3, 224, 224]
    are_positive = isinstance(shape, Sequence) and all(
        type(size) is int and size > 0 for size in shape
    )
    if not are_positive or len(shape) not in (1, 3):
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


def build_hardware(config: DictConfig) -> "Hardware":
    """Build the machine that options of the group ``hardware`` describe.

    Args:
        config: options of the group: FLOP/s, bytes/s, memory in bytes, ... as the fields of
            :class:`toolkit.cost.Hardware`.

    Raises:
        UserError: a field is impossible.
    """
    hardware: Hardware = make(config, "hardware", "toolkit.cost.Hardware")
    return hardware


def make(config: Any, group: str, such_as: str, **arguments: Any) -> Any:
    """Instantiate a choice of ``group``; raise UserError if it has no ``_target_``."""
    if config.get("_target_") is None:
        raise UserError(
            f"this choice of {group} has no _target_: add to its file what makes it, such as"
            f" _target_: {such_as}"
        )
    _look_here()
    return instantiate(config, **arguments)


def _look_here() -> None:
    """Add the current folder to the import path, so that a ``_target_`` can name a user's file."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())

"""Build plain options, schedules, models and runs from a configuration."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property, partial
from inspect import Parameter, signature
from math import inf
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class, get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from toolkit.cli.check_options import check_counts, check_own
from toolkit.errors import UserError
from toolkit.options import SaveOptions, SwitchOptions, TrainingOptions, with_own
from toolkit.schedule import Correction, RandomDelay, Schedule, ScheduleSpec, labels
from toolkit.schedule.plain_options import (
    OF_FILES,
    check_file_options,
    from_mapping,
    is_of_catalogue,
)
from toolkit.schedule.spec import with_phases

if TYPE_CHECKING:
    from torch import nn

    from toolkit.model import InputSpec
    from toolkit.runtime import World
    from toolkit.training import TrainingRun
    from toolkit.training.data import SampleSet

_JOIN = ("backend", "timeout", "interface")  # options of a runtime that are those of join()
_AFFORDABLE = "affordable"  # a delay; {within: 0.1} is one that may cost a tenth of a step


def plain(config: DictConfig) -> dict[str, Any]:
    """The resolved configuration as nested dicts and lists."""
    options: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return options


def training_options(config: DictConfig) -> TrainingOptions:
    """The plain options of a training run; raise UserError if a value is out of range."""
    options = plain(config)
    nested = {"save": SaveOptions, "switch": SwitchOptions}
    names = {field.name for field in fields(TrainingOptions)}
    values = {name: value for name, value in options.items() if name in names}
    return TrainingOptions(
        **values | {name: option_class(**options[name]) for name, option_class in nested.items()}
    )


def build_run(config: DictConfig, samples: "SampleSet | None" = None) -> "TrainingRun":
    """Build the training run that ``config`` describes.

    Args:
        config: options as ``experiments/train.py`` composes them; the sizes of a schedule that
            has its own are written into them.
        samples: samples for training and for the test, if they are loaded already.

    Raises:
        UserError: a part cannot be built, or does not fit the others; or the runtime takes many
            processes and this is not one of them.
    """
    from toolkit.training import prepare

    check_counts(config, "stages", "microbatches")
    options = training_options(config)
    load = cache(lambda: samples or load_samples(config.data))
    settle_delays(config, lambda: load().form)
    schedule = build_schedule(config.schedule)
    config.stages = schedule.n_stages
    config.microbatches = schedule.n_workers
    world = join_world(config, schedule)
    samples = load()
    lr = _made(config.lr, "lr", "toolkit.training.lr.Constant")
    # Lists of OmegaConf would be kept in the optimizer's state, and so in checkpoints.
    as_factory = {"_partial_": True, "_convert_": "all"}
    optimizer = _made(config.optimizer, "optimizer", "torch.optim.SGD", **as_factory)
    learning_rate = config.optimizer.get("lr", 0)
    if not isinstance(learning_rate, int | float):
        raise UserError(f"optimizer.lr is a number: got {learning_rate!r}")
    join_options = _JOIN if world else ()  # by join_world
    runtime = {name: value for name, value in config.runtime.items() if name not in join_options}
    return prepare(
        options,
        model=partial(build_model, config.model, samples.form),
        samples=samples,
        schedule=schedule,
        optimizer=optimizer,
        lr=lr,
        runtime=instantiate(runtime, _partial_=True),
        world=world,
        record=plain(config),
    )


def join_world(config: DictConfig, schedule: Schedule) -> "World | None":
    """Join the ranks of a runtime with a process a rank; None for one in a single process."""
    from toolkit.runtime.base import Runtime
    from toolkit.training.training_run import join_ranks

    runtime = get_class(config.runtime._target_)
    if not issubclass(runtime, Runtime):
        raise UserError(
            f"runtime: {config.runtime._target_} is not a runtime; expected a class such as"
            " toolkit.runtime.SingleProcess"
        )
    reach = {name: config.runtime[name] for name in _JOIN if name in config.runtime}
    return join_ranks(runtime, schedule, device=config.device, **reach)


def rule_config(config: DictConfig, rule: str, seed: int, **more: Any) -> DictConfig:
    """Return the configuration of one run of a comparison, with its rule's own options.

    Raises:
        UserError: ``own`` names a rule that is not compared, or an option that it cannot have.
    """
    check_own(config)
    options = with_own(plain(config), plain(config.own).get(rule) or {})
    return OmegaConf.create(options | {"schedule": options["rules"][rule], "seed": seed} | more)


@dataclass
class RuleBuilder:
    """Builds the runs of a comparison, by rule and seed; other processes take it pickled.

    Attributes:
        options: plain options of the comparison.
        loaded: its samples; None: each process loads them before its first run.
    """

    options: Mapping[str, Any]
    loaded: "SampleSet | None" = None

    def __call__(self, rule: str, seed: int) -> "TrainingRun":
        """Build the run of ``rule`` with ``seed``."""
        config = OmegaConf.create(dict(self.options))
        # A loss that is high, but a number, is a result like any other.
        config_of_rule = rule_config(config, rule, seed, guard="stop", guard_factor=inf)
        return build_run(config_of_rule, self.samples)

    @cached_property
    def samples(self) -> "SampleSet":
        """The samples of all runs."""
        return self.loaded or load_samples(OmegaConf.create(self.options["data"]))


def check_parallel(config: DictConfig) -> None:
    """Raise UserError unless ``parallel`` runs of a comparison can train at the same time."""
    check_counts(config, "parallel")
    if config.parallel == 1:
        return
    from toolkit.runtime import SingleProcess

    runtime = get_class(config.runtime._target_)
    if not issubclass(runtime, SingleProcess):
        raise UserError(
            f"parallel={config.parallel} trains each run in one process: got the runtime"
            f" {runtime.__name__}; take runtime=single_process, or parallel=1"
        )


def load_samples(config: DictConfig) -> "SampleSet":
    """Load the samples that options of the group ``data`` describe; raise UserError for others."""
    samples: SampleSet = _made(config, "data", "toolkit.training.data.digits")
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
    make = _made(arguments, "schedule", "toolkit.schedule.catalog.cyclic", **as_factory)
    schedule = make(**objects)
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"schedule: {config._target_} gives a {type(schedule).__name__}; expected a"
            " toolkit.schedule.Schedule, such as toolkit.schedule.catalog makes"
        )
    return with_phases(schedule, phases)


def settle_delays(config: DictConfig, form: "Callable[[], InputSpec]") -> None:
    """Write into ``config`` the delays that its schedules can afford, as matrices.

    Args:
        config: options of an experiment; those of a schedule with ``delay: affordable``, or
            ``delay: {within: SHARE}``, change.
        form: returns the form of the samples; called if a schedule asks for such a delay.

    Raises:
        UserError: no hardware is chosen, or the model cannot be analysed.
    """
    schedule_options = [config.get("schedule")]
    schedule_options += [
        rule for group in ("rules", "also") for rule in (config.get(group) or {}).values()
    ]
    affordable_options: list[tuple[DictConfig, dict[str, Any]]] = []
    for options in schedule_options:
        if not isinstance(options, DictConfig):
            continue
        delay: Any = options.get("delay")
        if delay == _AFFORDABLE:
            affordable_options.append((options, {}))
        elif isinstance(delay, DictConfig) and [*delay] == ["within"]:
            affordable_options.append((options, plain(delay)))
    if not affordable_options:
        return
    if not config.get("hardware"):
        raise UserError(
            "schedule.delay=affordable depends on the machine: choose one, as in"
            " hardware=ethernet_10; conf/hardware has more"
        )
    import torch

    from toolkit.cost import affordable_delay, profile, recomputing
    from toolkit.model import partition

    samples, hardware = form(), build_hardware(config.hardware)
    example = samples.example(config.batch, torch.device("meta"))
    with torch.device("meta"):
        model = build_model(config.model, samples)
    for options, limit in affordable_options:
        options.delay = 1
        schedule = build_schedule(options).final
        stages = partition(model, schedule.n_stages, example, config.partition)
        costs = profile(stages, example, precision=config.precision)
        costs = recomputing(costs, config.checkpoint)
        optimizer_bytes = [
            config.get("optimizer_words", 1.0) * cost.parameter_bytes for cost in costs
        ]
        delay_matrix = affordable_delay(
            schedule, costs, hardware, optimizer_bytes=optimizer_bytes, **limit
        )
        options.delay = [[*row] for row in delay_matrix]


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
    model = _made(options, "model", "toolkit.model.build", **form_arguments)
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
            example = "resnet18" if form.samples == "images" else "gpt"
            raise UserError(
                f"model={model_name(config)} takes no {form.samples}, since {config._target_} has"
                f" no {', '.join(missing_arguments)}: choose other data (or shape), or another"
                f" model, such as {example}; in a file of your own, write target instead of"
                " _target_"
            )
    return {str(name): config[name] for name in config if name not in excluded_options}


def model_name(config: DictConfig) -> str:
    """Return the name of a model, from the options of the group ``model``."""
    return str(config.get("target") or config.get("name") or config._target_.rpartition(".")[2])


def _parameters(config: DictConfig) -> set[str] | None:
    """Return the parameters of the function that builds a model; None if it takes any."""
    _look_here()
    function = get_method(config._target_)
    try:
        parameters = signature(function).parameters
    except ValueError:  # of some functions of C
        return None
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if takes_any else {*parameters}


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
    if shape is None:
        shape = [1024] if is_language_model else [3, 224, 224]
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


def build_hardware(config: DictConfig) -> Any:
    """Build the :class:`toolkit.cost.Hardware` of a group's options; UserError if impossible."""
    return _made(config, "hardware", "toolkit.cost.Hardware")


def _made(config: Any, group: str, such_as: str, **arguments: Any) -> Any:
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

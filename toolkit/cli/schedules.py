"""Build schedules from options of the group ``schedule``."""

from omegaconf import DictConfig, OmegaConf

from toolkit.cli.instantiate import make, plain
from toolkit.errors import UserError
from toolkit.schedule import Correction, RandomDelay, Schedule, ScheduleSpec, labels
from toolkit.schedule.plain_options import (
    OF_FILES,
    check_file_options,
    from_mapping,
    is_of_catalogue,
)
from toolkit.schedule.spec_phases import with_phases


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
    # The user's own function: it takes objects where the catalogue takes plain values.
    arguments = {name: value for name, value in options.items() if name not in OF_FILES}
    described = {"delay": RandomDelay, "correction": Correction}
    objects = {
        name: from_mapping(arguments.pop(name), described_class)
        for name, described_class in described.items()
        if name in arguments
    }
    as_factory = {"_partial_": True, "_convert_": "all"}
    factory = make(
        arguments, "schedule", "toolkit.schedule.catalog.cyclic", **as_factory
    )
    schedule = factory(**objects)
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"schedule: {config._target_} gives a {type(schedule).__name__}; expected a"
            " toolkit.schedule.Schedule, such as toolkit.schedule.catalog makes"
        )
    return with_phases(schedule, phases)


def build_schedules(config: DictConfig) -> dict[str, Schedule]:
    """Build the schedule of ``config`` and those of ``also``, each by a label of its own.

    Args:
        config: options of an experiment, with the groups ``schedule`` and ``also``.

    Raises:
        UserError: one is impossible, or ``also`` has another ``schedule``.
    """
    if "schedule" in config.also:
        raise UserError(
            "also.schedule is the name of the first schedule: choose another"
        )
    schedule_of_key = {"schedule": build_schedule(config.schedule)}
    schedule_of_key |= {
        str(name): build_schedule(schedule) for name, schedule in config.also.items()
    }
    label_of_key = labels(
        {name: schedule.name for name, schedule in schedule_of_key.items()}
    )
    return {label_of_key[name]: schedule for name, schedule in schedule_of_key.items()}

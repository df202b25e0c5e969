"""Schedules rebuilt from the options of runs."""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.schedule import Schedule, catalog

_CATALOG = "toolkit.schedule.catalog."
_NOT_OF_METHODS = ("_target_", "file", "period")
_MOST_OPS = 1_000_000  # of a schedule


def rebuild_schedule(options: Mapping[str, Any]) -> "Schedule":
    """Return the schedule that a run's options describe.

    A result may come from anyone, so nothing that it names is imported, instantiated or resolved:
    only a function of the catalogue is called, with plain values.

    Args:
        options: the group ``schedule`` of a configuration, or a rule of a comparison.

    Raises:
        UserError: they do not describe a schedule of this version.
    """
    target = options.get("_target_")
    name = target.removeprefix(_CATALOG) if isinstance(target, str) else ""
    if name not in catalog.FACTORIES:
        raise UserError(f"{target!r} is not a schedule of the catalogue")
    sizes = [options.get(name) for name in ("n", "n_stages", "n_microbatches", "accumulate")]
    n_ops = prod(size for size in sizes if isinstance(size, int) and size > 0)
    if "${" in str(options) or n_ops > _MOST_OPS:
        raise UserError("its options are not those of a schedule that has run")
    arguments = {key: value for key, value in options.items() if key not in _NOT_OF_METHODS}
    if arguments.get("delay", 0) is None:
        del arguments["delay"]
    try:
        if file := options.get("file"):
            free: dict[str, Any] = catalog.plain_delay(arguments)
            free |= {k: arguments[k] for k in ("state", "predict") if k in arguments}
            path = Path(file)
            return Schedule.from_csv(path, name=path.stem, period=options.get("period"), **free)
        return catalog.build(name, **arguments)
    except (OSError, TypeError, OverflowError) as error:
        raise UserError(first_line(error)) from error


def schedule_name(options: Any) -> str | None:
    """Return the schedule's name, or None if ``options`` do not describe a schedule."""
    try:
        return rebuild_schedule(options).name if isinstance(options, dict) else None
    except ValueError:
        return None

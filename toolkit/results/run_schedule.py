"""The schedule of a run, rebuilt from the options that its result has."""

from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, first_line
from toolkit.files import check_regular
from toolkit.schedule import Schedule, ScheduleSpec
from toolkit.schedule.plain_options import is_of_catalogue

DIGEST = "file_sha256"
"""Option of a rule in the ``runs.yaml`` of a comparison: digest of its file of rank orders."""

_MOST_OPS = 1_000_000  # of a schedule


def rebuild_schedule(options: Mapping[str, Any]) -> Schedule:
    """Return the schedule that a run's options describe.

    A result may come from anyone, so nothing that it names is imported, instantiated or resolved:
    only a function of the catalogue is called, with plain values.

    Args:
        options: the group ``schedule`` of a configuration, or a rule of a comparison.

    Raises:
        UserError: they do not describe a schedule of this version.
    """
    if not is_of_catalogue(options):
        raise UserError(
            f"{options.get('_target_')!r} is not a schedule of the catalogue"
        )
    sizes = [
        options.get(name) for name in ("n", "n_stages", "n_microbatches", "accumulate")
    ]
    # A result may come from anyone: sizes without a limit could fill memory before any check of the
    # schedule.
    n_ops = prod(size for size in sizes if isinstance(size, int) and size > 0)
    if "${" in str(options) or n_ops > _MOST_OPS:
        raise UserError("its options are not those of a schedule that has run")
    config = {name: value for name, value in options.items() if name != DIGEST}
    # Its name in runs before there were other corrections.
    if config.pop("predict", False):
        config["correction"] = "extrapolate"
    try:
        if config.get("file"):
            check_regular(Path(config["file"]))
        return ScheduleSpec.from_config(config).build()
    except (OSError, TypeError, OverflowError) as error:
        raise UserError(first_line(error)) from error


def schedule_name(options: Any) -> str | None:
    """Return the schedule's name, or None if ``options`` do not describe a schedule."""
    if isinstance(options, dict):
        with suppress(ValueError):
            return rebuild_schedule(options).name
    return None

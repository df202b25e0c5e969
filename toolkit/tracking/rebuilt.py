"""Schedules of runs, rebuilt from the options that these had."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from toolkit.messages import first_line

if TYPE_CHECKING:
    from toolkit.schedule import Schedule

_CATALOG = "toolkit.schedule.catalog."
_MOST_OPS = 1_000_000  # of a schedule


def rebuild_schedule(options: Mapping[str, Any]) -> "Schedule":
    """The schedule that a run's options describe.

    Only the catalogue's own functions are called, and nothing is read from the environment,
    whatever a result names.

    Raises:
        ValueError: they describe none, or none of this version.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from toolkit.config import build_schedule

    target = options.get("_target_")
    name = target.removeprefix(_CATALOG) if isinstance(target, str) else ""
    if not isinstance(target, str) or not target.startswith(_CATALOG) or not name.isidentifier():
        raise ValueError(f"{target!r} is not a schedule of the catalogue")
    sizes = [options.get(name) for name in ("n", "n_stages", "n_microbatches", "accumulate")]
    n_ops = prod(size for size in sizes if isinstance(size, int) and size > 0)
    if "${" in str(options) or n_ops > _MOST_OPS:
        raise ValueError("its options are not those of a schedule that has run")
    try:
        return build_schedule(OmegaConf.create(dict(options)))
    except (HydraException, OmegaConfBaseException, OSError, TypeError) as error:
        raise ValueError(first_line(error)) from error


def schedule_name(options: Any) -> str | None:
    """What the schedule of these options is called; None if they describe none."""
    try:
        return rebuild_schedule(options).name if isinstance(options, dict) else None
    except ValueError:
        return None

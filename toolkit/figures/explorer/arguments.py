"""What the explorer is given: schedules by name or as they are, costs, and machines on offer."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolkit.cost import UNIT, Costs, Hardware
from toolkit.cost.hardware import check_hardware, presets
from toolkit.cost.worker_forms import CostsOf
from toolkit.errors import UserError
from toolkit.figures.explorer.controls import lines_of
from toolkit.figures.explorer.inspection import AFFORDABLE, check_sizes, drawable
from toolkit.schedule import Schedule, ScheduleSpec


def check_same_sizes(first: ScheduleSpec, second: ScheduleSpec) -> None:
    """Raise UserError unless both schedules have as many stages and micro-batches."""
    if (first.stages, first.microbatches) != (second.stages, second.microbatches):
        raise UserError(
            "schedules side by side have the same stages and micro-batches: got"
            f" {first.stages} x {first.microbatches} and"
            f" {second.stages} x {second.microbatches}"
        )


def of_any_cut(costs: Costs | Callable[[int], Costs]) -> CostsOf:
    """Return a function of stages and a cut that takes no account of the cut."""
    return lambda n_stages, _: costs(n_stages) if callable(costs) else costs


def machines_on_offer(hardware: Hardware | None) -> dict[str, Hardware]:
    """Return the machines on offer by name: the unit machine, the presets, and ``hardware``."""
    machines = {"unit": UNIT}
    try:
        machines |= presets()
    except UserError as error:
        warnings.warn(f"the explorer offers no other machines: {error}", stacklevel=3)
    if hardware is not None:
        machines[check_hardware(hardware).name] = hardware
    return machines


def chosen_spec(
    schedule: str | Schedule, stages: int, microbatches: int, options: dict[str, Any]
) -> ScheduleSpec:
    """Return the spec of a name and options, or of a schedule."""
    if isinstance(schedule, str):
        orders = options.get("orders", ())
        orders = lines_of(orders) if isinstance(orders, str) else tuple(orders)
        spec = ScheduleSpec(
            schedule, stages, microbatches, **{**options, "orders": orders}
        )
        drawable(replace(spec, delay=1) if spec.delay == AFFORDABLE else spec)
        return spec
    if not isinstance(schedule, Schedule):
        raise UserError(
            f"a schedule is a Schedule, or a name such as 'cdp_v2': got {schedule!r}"
        )
    if options:
        raise UserError(
            f"a Schedule has its own options: leave out {', '.join(options)}"
        )
    check_sizes(schedule.n_stages, schedule.n_workers, schedule.accumulate)
    return ScheduleSpec.of(schedule)

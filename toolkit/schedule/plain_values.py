"""Schedules from plain values: names, numbers and mappings, as options and results hold them."""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from toolkit.errors import UserError, suggest
from toolkit.schedule import catalog
from toolkit.schedule.correction import Correction
from toolkit.schedule.phases import Phase, after
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import RandomDelay


def build(name: str, **options: Any) -> Schedule:
    """Build a schedule from plain values.

    Args:
        name: of a method (``cdp_v1``) or of a factory (``cyclic``).
        options: sizes and options of the factory; a mapping as ``delay`` is a
            :class:`RandomDelay`, as ``correction`` a :class:`Correction`.
    """
    phases = options.pop("phases", ())
    make = catalog.METHODS.get(name) or catalog.FACTORIES.get(name)
    if make is None:
        known_names = (*catalog.METHODS, *catalog.FACTORIES)
        raise UserError(f"unknown schedule {name!r}: {suggest(name, known_names)}")
    return with_phases(make(**{**options, **from_mappings(options)}), phases)


def with_phases(schedule: Schedule, phases: Sequence[Mapping[str, Any]]) -> Schedule:
    """Return ``schedule`` after others, which plain values describe.

    Args:
        schedule: the last.
        phases: a mapping for each of those before: ``schedule``, the name of a method; its
            ``steps`` or ``epochs``; and options of the method, by default those of the last.

    Raises:
        UserError: one is no such mapping, or cannot be built.
    """
    if not isinstance(phases, Sequence) or isinstance(phases, str):
        raise UserError(
            f"phases: got {phases!r}; expected a list, as [{{schedule: dp, epochs: 1}}]"
        )
    earlier_phases = []
    for description in phases:
        if not isinstance(description, Mapping):
            raise UserError(
                f"phases: got {description!r}; expected {{schedule: NAME, epochs: 1}}, each"
            )
        lengths = {name: description.get(name) for name in ("steps", "epochs")}
        method_options = {name: value for name, value in description.items() if name not in lengths}
        earlier_phases.append(Phase(alike(schedule, method_options, "phases"), **lengths))
    return after(earlier_phases, schedule) if earlier_phases else schedule


def alike(schedule: Schedule, given: Any, what: str = "candidates") -> Schedule:
    """Build a method of as many stages, micro-batches and ranks as ``schedule``.

    Args:
        schedule: what gives the sizes, and the placement and state unless the method has its own.
        given: the name of a method; or a mapping of ``schedule``, its name, and its options.
        what: what it is for, in errors.
    """
    name, method_options = given, {}
    if isinstance(given, Mapping):
        name, method_options = (
            given.get("schedule"),
            {key: value for key, value in given.items() if key != "schedule"},
        )
    if name not in catalog.METHODS:
        raise UserError(
            f"{what}: got {given!r}; expected the name of a method, or {{schedule: NAME}} with"
            f" options: {suggest(str(name), [*catalog.METHODS])}"
        )
    method = catalog.METHODS[name]
    defaults = {"n": schedule.n_workers, "placement": schedule.placement, "state": schedule.state}
    defaults |= {name: getattr(schedule, name) for name in ("n_stages", "n_microbatches")}
    defaults |= {"accumulate": schedule.accumulate}
    takes = signature(method.factory).parameters.keys() - method.options
    return build(
        name, **{key: value for key, value in defaults.items() if key in takes} | method_options
    )


DESCRIBED: Mapping[str, type] = {"delay": RandomDelay, "correction": Correction}
"""Options that may be a mapping: that of the arguments of a class."""


def from_mappings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of :data:`DESCRIBED` that are given, as schedules take them."""
    return {
        name: make(**options[name]) if isinstance(options[name], Mapping) else options[name]
        for name, make in DESCRIBED.items()
        if name in options
    }

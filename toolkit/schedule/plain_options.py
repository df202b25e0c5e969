"""Options of schedules as plain values: which a method takes, and how they are written."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

from toolkit.errors import UserError, suggest
from toolkit.schedule.correction import Correction
from toolkit.schedule.registry import FACTORIES, METHODS
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import RandomDelay

RANK_ORDERS = "your own"
"""The method of a spec whose orders, or file of orders, are the user's."""

ORDERS_FILE = "rank_orders.csv"
"""Name of the file that command lines give for rank orders."""

OPTIONS = (
    "delay",
    "correction",
    "placement",
    "state",
    "n_ranks",
    "accumulate",
    "chains",
    "groups",
)
"""Options of methods, apart from their sizes."""

OF_FILES = {"file": None, "period": None, "unfold": False}
"""Options of files of rank orders, with the values that leave them out."""

# Values with which conf/schedule composes a method. With a file they mean "not asked for".
_OF_METHODS = {
    "placement": "per_microbatch",
    "chains": "in_order",
    "accumulate": 1,
    "groups": None,
}
CATALOG = "toolkit.schedule.catalog."


def options_of(method: str) -> dict[str, Any]:
    """Return options that ``method`` takes besides its sizes, with their defaults.

    Required ones have None. Raises UserError for an unknown method.
    """
    if method not in METHODS and method != RANK_ORDERS:
        known_names = [*METHODS, RANK_ORDERS]
        raise UserError(
            f"unknown schedule {method!r}: {suggest(str(method), known_names)}"
        )
    defaults: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory_of(method)).parameters.items():
        if name in OPTIONS:
            # Such as the ranks of an interleaved pipeline.
            is_required = parameter.default is parameter.empty
            defaults[name] = None if is_required else parameter.default
    if method in METHODS:
        defaults |= METHODS[method].options
    return defaults


def from_mapping(value: Any, described: type) -> Any:
    """Return ``value``, or ``described(**value)`` if it is a mapping.

    Raises:
        UserError: ``described`` has no such argument, or refuses its value.
    """
    if not isinstance(value, Mapping):
        return value
    names = [field.name for field in fields(described)]
    for name in value:
        if name not in names:
            raise UserError(
                f"a {described.__name__} has no option {name!r}: {suggest(str(name), names)}"
            )
    return described(**value)


def check_arguments(factory: str, method: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserError unless the function of ``method`` takes these arguments, and needs no other.

    Args:
        factory: how the user names it, for errors.
        method: a name of the registry.
        arguments: arguments of the call, by name.
    """
    parameters = inspect.signature(METHODS[method].factory).parameters
    for name in arguments:
        if name not in parameters:
            takes = ", ".join(parameters)
            raise UserError(
                f"{factory} has no {name}: got {arguments[name]!r}; it takes {takes}"
            )
    # The method fixes some arguments, which the call may leave out.
    known_values = {**arguments, **METHODS[method].options}
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in known_values:
            given_names = ", ".join(arguments) or "no argument"
            raise UserError(f"{factory} needs {name}: got {given_names}")


def check_file_options(config: Mapping[str, Any]) -> None:
    """Raise UserError if options of named methods meet those of files of rank orders.

    Args:
        config: options of the group ``schedule``.
    """
    file = config.get("file")
    if file == "":
        raise UserError(
            "schedule.file is empty: give a CSV file of rank orders, or null"
        )
    neutral_values = _OF_METHODS if file is not None else OF_FILES
    for name, neutral in neutral_values.items():
        value = config.get(name, neutral)
        if value != neutral:
            raise UserError(
                f"schedule.{name}={value} and schedule.file={file or 'null'}: placement, chains,"
                " accumulate and groups belong to named methods, period and unfold to files: leave"
                " one out"
            )


def is_of_catalogue(config: Mapping[str, Any]) -> bool:
    """Whether options of the group ``schedule`` name a function of the catalogue."""
    return str(config.get("_target_")).removeprefix(CATALOG) in FACTORIES


def in_hydra(value: Any) -> str:
    """Return ``value`` in Hydra's grammar, without blanks."""
    if isinstance(value, RandomDelay | Correction):
        value = {
            name: entry for name, entry in asdict(value).items() if entry is not None
        }
    if isinstance(value, Mapping):
        entries = [f"{name}:{in_hydra(entry)}" for name, entry in value.items()]
        return "{" + ",".join(entries) + "}"
    if isinstance(value, tuple):
        return "[" + ",".join(in_hydra(entry) for entry in value) + "]"
    return str(value)


def factory_of(method: str) -> Callable[..., Schedule]:
    """Return the function that builds the schedules of a method."""
    return (
        Schedule.from_rank_orders if method == RANK_ORDERS else METHODS[method].factory
    )


def method_of_call(factory: str, arguments: Mapping[str, Any]) -> str:
    """Return the method whose fixed options a call of ``factory`` has; the most of them."""
    # A call cyclic(n, delay=1, state="sharded") fits cdp_v1, cdp_v2 and zero_cdp_v1, among others.
    # The last, with the most options, says the most of it.
    of_factory = [m for m in METHODS.values() if m.factory is FACTORIES[factory]]
    matching = []
    for method in of_factory:
        if all(arguments.get(name) == value for name, value in method.options.items()):
            matching.append(method)
    # Options that fix a method, such as two ranks, may have another value in a call of its own.
    return max(matching or of_factory[:1], key=lambda method: len(method.options)).name

"""What is explored: a method and its options, as one value that names its schedule.

A choice can be said in three ways that mean the same schedule: as an object, as one line of Python,
and as overrides of the experiments' configuration.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from shlex import quote
from typing import Any

from toolkit.errors import UserError, suggest
from toolkit.schedule import RandomDelay, Schedule
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.staleness import Delay, plain

OWN = "your own"
LARGEST = 32  # stages or micro-batches that are drawn
ORDERS_FILE = "rank_orders.csv"


SCHEDULES = (*METHODS, OWN)
_OPTIONS = ("delay", "predict", "placement", "state", "n_ranks", "accumulate")
_OWN_OPTIONS: dict[str, Any] = {"delay": 0, "predict": False, "state": "replicated"}


@cache
def _defaults(schedule: str) -> Mapping[str, Any]:
    """The factory's own values of the options offered; None where it has none."""
    parameters = inspect.signature(METHODS[schedule].factory).parameters
    return {
        name: None if p.default is p.empty else p.default
        for name, p in parameters.items()
        if name in _OPTIONS
    }


def options_of(schedule: str) -> dict[str, Any]:
    """The options that ``schedule`` takes beside its sizes, with their values unless chosen.

    Raises:
        ValueError: there is no such schedule.
    """
    if schedule == OWN:
        return dict(_OWN_OPTIONS)
    if schedule not in METHODS:
        raise UserError(f"unknown schedule {schedule!r}: {suggest(str(schedule), SCHEDULES)}")
    return {**_defaults(schedule), **METHODS[schedule].options}


@dataclass(frozen=True)
class Choice:
    """A schedule, by name and options; an option that is None is as the schedule has it.

    Args:
        schedule: a choice of conf/schedule, or ``"your own"``.
        stages: parts of the model; with orders of your own, these tell.
        microbatches: of a training step, of one round where workers accumulate; with orders of
            your own, these tell.
        delay: steps by which weights are late, also as a list or a matrix, or ``"freshest"``.
        predict: whether late weights are extrapolated to the step that reads them.
        placement: the rank of each op.
        state: ``replicated`` or ``sharded``.
        n_ranks: of interleaved 1F1B.
        accumulate: micro-batches that each worker runs one after another in a step.
        orders: your own: a line a rank, such as ``"0F0 0F1 0B0 0B1"``.
    """

    schedule: str = "cdp_v2"
    stages: int = 4
    microbatches: int = 4
    delay: Delay | None = None
    predict: bool | None = None
    placement: str | None = None
    state: str | None = None
    n_ranks: int | None = None
    accumulate: int | None = None
    orders: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.delay is not None:
            object.__setattr__(self, "delay", plain(self.delay))

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from those of the schedule.

        Raises:
            ValueError: the schedule has no such option.
        """
        usual = options_of(self.schedule)
        chosen = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        for name, value in chosen.items():
            if name not in usual:
                takes = ", ".join(usual) or "none but its sizes"
                raise UserError(f"{self.schedule} has no {name}, got {value!r}: it takes {takes}")
        return {name: value for name, value in chosen.items() if value != usual[name]}

    def build(self) -> Schedule:
        """The schedule.

        Raises:
            ValueError: there is none such; the message may end with a grid.
        """
        return _build(self)

    def python(self) -> str:
        """One line that makes the schedule, of what ``toolkit.schedule`` has."""
        name, sizes, options = self._call()
        words = [*map(repr, sizes), *(f"{key}={value!r}" for key, value in options.items())]
        return f"{name}({', '.join(words)})"

    def overrides(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that compose the schedule.

        Raises:
            ValueError: the schedule has no option that was chosen.
        """
        if self.schedule != OWN:
            sizes = {"schedule": self.schedule, "stages": self.stages}
            sizes["microbatches"] = self.microbatches
            return _overrides(sizes, self.given)
        return _overrides({"schedule.file": ORDERS_FILE}, {"delay": 0, **self.given})

    def _call(self) -> tuple[str, list[Any], dict[str, Any]]:
        if self.schedule == OWN:
            return "Schedule.from_rank_orders", [list(self.orders)], self.given
        method = METHODS[self.schedule]
        usual = _defaults(self.schedule)
        wanted = {**method.options, **self.given}
        options = {name: value for name, value in wanted.items() if value != usual[name]}
        make = f"catalog.{method.factory.__name__}"
        parameters = inspect.signature(method.factory).parameters
        if "n" not in parameters:
            return make, [self.stages, self.microbatches], options
        preset = parameters["n_stages"].default
        if self.stages != (self.microbatches if preset is None else preset):
            options["n_stages"] = self.stages
        return make, [self.microbatches], options


def choice_of(schedule: Schedule) -> Choice | None:
    """What one would choose to see ``schedule``, by its own name or another; None: nothing."""
    making = [choice for choice in _candidates(schedule) if _makes(choice, schedule)]
    exact = [choice for choice in making if choice.build().name == schedule.name]
    return next(iter(exact + making), None)


def _candidates(schedule: Schedule) -> Iterator[Choice]:
    sizes = schedule.n_stages, schedule.n_workers
    named = {name: getattr(schedule, name) for name in _OPTIONS if hasattr(schedule, name)}
    for name in METHODS:
        options: dict[str, Any] = {k: v for k, v in named.items() if k in options_of(name)}
        if "n_ranks" in options:
            options["n_ranks"] = schedule.n_ranks
        yield Choice(name, *sizes, **options)
    with suppress(ValueError):  # it is no pipeline
        orders = tuple(line.replace(",", " ") for line in schedule.to_csv().splitlines())
        own: dict[str, Any] = {k: v for k, v in named.items() if k in _OWN_OPTIONS}
        yield Choice(OWN, *sizes, orders=orders, **own)


def _makes(choice: Choice, schedule: Schedule) -> bool:
    """Whether it is ``schedule``, by whichever name."""
    try:
        built = choice.build()
    except ValueError:
        return False
    if choice.schedule == OWN:
        built = replace(built, placement=schedule.placement)
    return replace(built, name=schedule.name) == schedule


@lru_cache(maxsize=64)
def _build(choice: Choice) -> Schedule:
    given = choice.given
    if choice.schedule == OWN:
        if not any(line.strip() for line in choice.orders):
            raise UserError(
                "there are no rank orders: write a line a rank, such as 0F0 0F1 0B0 0B1"
            )
        built = Schedule.from_rank_orders(choice.orders, **given)
        check_sizes(built.n_stages, built.n_microbatches)
        return built
    check_sizes(choice.stages, choice.microbatches, choice.accumulate)
    _, sizes, options = choice._call()
    schedule: Schedule = METHODS[choice.schedule].factory(*sizes, **options)
    return schedule


def _overrides(sizes: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    given = {**sizes, **{f"schedule.{name}": value for name, value in options.items()}}
    return " ".join(quote(f"{key}={_written(value)}") for key, value in given.items())


def _written(value: Any) -> str:
    """As Hydra reads it, without blanks."""
    if isinstance(value, RandomDelay):
        drawn = {key: x for key, x in asdict(value).items() if x is not None}
        return "{" + ",".join(f"{key}:{x}" for key, x in drawn.items()) + "}"
    return f"[{','.join(map(_written, value))}]" if isinstance(value, tuple) else str(value)


def check_sizes(stages: int, microbatches: int, accumulate: int | None = None) -> None:
    """Refuse what is no number of stages or micro-batches, or more than can be drawn.

    Raises:
        ValueError: one of them is, or all rounds together are.
    """
    rounds = 1 if accumulate is None else accumulate
    sizes = {"stages": stages, "microbatches": microbatches, "accumulate": rounds}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise UserError(f"{name} is a whole number from 1 to {LARGEST}: got {value!r}")
    if microbatches * rounds > LARGEST:
        raise UserError(
            f"{rounds} x {microbatches} micro-batches are more than the {LARGEST} that are drawn:"
            f" lower accumulate or microbatches"
        )

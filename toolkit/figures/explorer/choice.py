"""A method and its options as one value, which names its schedule in three equal ways.

They are: as an object, as one line of Python, and as overrides of the experiments' configuration.
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
LARGEST = 32  # stages or micro-batches in a drawing
ORDERS_FILE = "rank_orders.csv"

SCHEDULES = (*METHODS, OWN)
_OPTIONS = ("delay", "predict", "placement", "state", "n_ranks", "accumulate")
_OWN_OPTIONS: dict[str, Any] = {"delay": 0, "predict": False, "state": "replicated"}


@cache
def _defaults(schedule: str) -> Mapping[str, Any]:
    """The factory's own values of its options; None for a required one."""
    parameters = inspect.signature(METHODS[schedule].factory).parameters
    return {
        name: None if p.default is p.empty else p.default
        for name, p in parameters.items()
        if name in _OPTIONS
    }


def options_of(schedule: str) -> dict[str, Any]:
    """Options that ``schedule`` takes besides its sizes, with their defaults.

    Raises:
        UserError: an unknown schedule.
    """
    if schedule == OWN:
        return dict(_OWN_OPTIONS)
    if schedule not in METHODS:
        raise UserError(f"unknown schedule {schedule!r}: {suggest(str(schedule), SCHEDULES)}")
    return {**_defaults(schedule), **METHODS[schedule].options}


@dataclass(frozen=True)
class Choice:
    """A schedule by name and options; None stands for the schedule's default.

    Args:
        schedule: a choice of conf/schedule, or ``"your own"``.
        stages: parts of the model; ignored with orders of your own.
        microbatches: of a training step, or of one round where workers accumulate; ignored with
            orders of your own.
        delay: steps by which weights are late, also as a list or a matrix, or ``"freshest"``.
        predict: whether late weights are extrapolated to the step that reads them.
        placement: the rank of each op.
        state: ``replicated`` or ``sharded``.
        n_ranks: of interleaved 1F1B.
        accumulate: micro-batches that each worker runs one after another in a step.
        orders: your own: one line a rank, such as ``"0F0 0F1 0B0 0B1"``.
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
        """The options that differ from the schedule's defaults.

        Raises:
            UserError: the schedule has no such option.
        """
        usual = options_of(self.schedule)
        chosen = {name: value for name in _OPTIONS if (value := getattr(self, name)) is not None}
        for name, value in chosen.items():
            if name not in usual:
                takes = ", ".join(usual) or "only its sizes"
                raise UserError(f"{self.schedule} has no {name}, got {value!r}: it takes {takes}")
        return {name: value for name, value in chosen.items() if value != usual[name]}

    def check(self) -> None:
        """Check names and sizes.

        Raises:
            UserError: the schedule has no such option, or one is out of range.
        """
        self.given  # noqa: B018
        check_sizes(self.stages, self.microbatches, self.accumulate)
        if self.schedule != OWN and self.orders:
            raise UserError(f"orders are those of schedule={OWN!r}: got {self.schedule!r}")
        if self.schedule == OWN and not any(line.strip() for line in self.orders):
            raise UserError(
                "there are no rank orders: write a line a rank, such as 0F0 0F1 0B0 0B1"
            )

    def build(self) -> Schedule:
        """The schedule.

        Raises:
            UserError: it is impossible; the message may end with a grid.
        """
        return _build(self)

    def python(self) -> str:
        """One line that makes the schedule from the names of ``toolkit.schedule``."""
        name, sizes, options = self._call()
        words = [*map(repr, sizes), *(f"{key}={value!r}" for key, value in options.items())]
        return f"{name}({', '.join(words)})"

    def overrides(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that make the schedule.

        Raises:
            UserError: the schedule has no such option.
        """
        sizes: dict[str, Any] = {"schedule.file": ORDERS_FILE}
        options = {"delay": 0, **self.given}
        if self.schedule != OWN:
            sizes = {"schedule": self.schedule, "stages": self.stages}
            sizes["microbatches"] = self.microbatches
            options = self.given
        words = sizes | {f"schedule.{name}": value for name, value in options.items()}
        return " ".join(quote(f"{key}={_written(value)}") for key, value in words.items())

    def _call(self) -> tuple[str, list[Any], dict[str, Any]]:
        """Name, sizes and options of the call that makes the schedule."""
        if self.schedule == OWN:
            return "Schedule.from_rank_orders", [list(self.orders)], self.given
        method, usual = METHODS[self.schedule], _defaults(self.schedule)
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


@lru_cache(maxsize=64)
def _build(choice: Choice) -> Schedule:
    choice.check()
    _, sizes, options = choice._call()
    if choice.schedule != OWN:
        return METHODS[choice.schedule].factory(*sizes, **options)
    built = Schedule.from_rank_orders(choice.orders, **options)
    check_sizes(built.n_stages, built.n_microbatches)
    return built


def choice_of(schedule: Schedule) -> Choice | None:
    """The choice that makes ``schedule``, under the same name if possible, or None."""
    making = [choice for choice in _candidates(schedule) if _makes(choice, schedule)]
    exact = [choice for choice in making if choice.build().name == schedule.name]
    return next(iter(exact + making), None)


def _candidates(schedule: Schedule) -> Iterator[Choice]:
    sizes = schedule.n_stages, schedule.n_workers
    named = {name: getattr(schedule, name) for name in _OPTIONS if hasattr(schedule, name)}
    for name in METHODS:
        yield Choice(name, *sizes, **{k: v for k, v in named.items() if k in options_of(name)})
    with suppress(ValueError):  # not a pipeline
        orders = tuple(line.replace(",", " ") for line in schedule.to_csv().splitlines())
        own: dict[str, Any] = {k: v for k, v in named.items() if k in _OWN_OPTIONS}
        yield Choice(OWN, *sizes, orders=orders, **own)


def _makes(choice: Choice, schedule: Schedule) -> bool:
    """Whether it makes ``schedule``, under any name."""
    try:
        built = choice.build()
    except ValueError:
        return False
    if choice.schedule == OWN:
        built = replace(built, placement=schedule.placement)
    return replace(built, name=schedule.name) == schedule


def _written(value: Any) -> str:
    """``value`` in Hydra's grammar, without blanks."""
    if isinstance(value, RandomDelay):
        drawn = {key: x for key, x in asdict(value).items() if x is not None}
        return "{" + ",".join(f"{key}:{x}" for key, x in drawn.items()) + "}"
    return f"[{','.join(map(_written, value))}]" if isinstance(value, tuple) else str(value)


def check_sizes(stages: int, microbatches: int, accumulate: int | None = None) -> None:
    """Check that sizes can be drawn.

    Raises:
        UserError: one of them, or all rounds together, is not from 1 to 32.
    """
    rounds = 1 if accumulate is None else accumulate
    sizes = {"stages": stages, "microbatches": microbatches, "accumulate": rounds}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
            raise UserError(f"{name} is a whole number from 1 to {LARGEST}: got {value!r}")
    if microbatches * rounds > LARGEST:
        raise UserError(
            f"at most {LARGEST} micro-batches can be drawn: got {rounds} x {microbatches}; lower"
            " accumulate or microbatches"
        )

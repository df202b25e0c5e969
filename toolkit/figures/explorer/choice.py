"""A method and its options as one value, which names its schedule in three equal ways.

They are: as an object, as one line of Python, and as overrides of the experiments' configuration.
"""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from shlex import quote
from typing import Any

from toolkit.errors import UserError, suggest, whole
from toolkit.schedule import RandomDelay, Schedule
from toolkit.schedule.catalog import METHODS
from toolkit.schedule.staleness import Delay, plain

OWN = "your own"
LARGEST = 32  # stages or micro-batches in a drawing
ORDERS_FILE = "rank_orders.csv"
OPTIONS = ("delay", "predict", "placement", "state", "n_ranks", "accumulate")
SCHEDULES = (*METHODS, OWN)


def options_of(schedule: str) -> dict[str, Any]:
    """Options that ``schedule`` takes besides its sizes, with their defaults; None if required.

    Raises:
        UserError: an unknown schedule.
    """
    if schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {schedule!r}: {suggest(str(schedule), SCHEDULES)}")
    parameters = inspect.signature(_factory(schedule)).parameters.items()
    usual = {k: None if p.default is p.empty else p.default for k, p in parameters if k in OPTIONS}
    return usual if schedule == OWN else {**usual, **METHODS[schedule].options}


def _factory(schedule: str) -> Any:
    return Schedule.from_rank_orders if schedule == OWN else METHODS[schedule].factory


@dataclass(frozen=True)
class Choice:
    """A schedule by name and options; None stands for the schedule's default."""

    schedule: str = "cdp_v2"  # a choice of conf/schedule, or "your own"
    stages: int = 4  # parts of the model, 1 to 32; ignored with orders of your own
    microbatches: int = 4  # of a training step, or of one round where workers accumulate
    delay: Delay | None = None  # steps by which weights are late; a list, a matrix or "freshest"
    predict: bool | None = None  # extrapolate late weights to the step that reads them
    placement: str | None = None  # the rank of each op
    state: str | None = None  # replicated or sharded
    n_ranks: int | None = None  # of interleaved 1F1B
    accumulate: int | None = None  # micro-batches of a worker, one after another in a step
    orders: tuple[str, ...] = ()  # your own: one line a rank, such as "0F0 0F1 0B0 0B1"

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
        chosen = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        for name, value in chosen.items():
            if name not in usual:
                takes = ", ".join(usual) or "only its sizes"
                raise UserError(f"{self.schedule} has no {name}, got {value!r}: it takes {takes}")
        return {name: value for name, value in chosen.items() if value != usual[name]}

    def build(self) -> Schedule:
        """The schedule.

        Raises:
            UserError: an option or a size is refused, or the schedule is impossible; the message
                may end with a grid.
        """
        return _build(self)

    def python(self) -> str:
        """One line that makes the schedule from the names of ``toolkit.schedule``."""
        name = f"catalog.{_factory(self.schedule).__name__}"
        if self.schedule == OWN:
            name = "Schedule.from_rank_orders"
        return f"{name}({', '.join(f'{key}={x!r}' for key, x in self._arguments().items())})"

    def overrides(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that make the schedule."""
        words: dict[str, Any] = {"stages": self.stages, "microbatches": self.microbatches}
        options = {f"schedule.{name}": value for name, value in self.given.items()}
        if self.schedule == OWN:
            words = {"schedule.file": ORDERS_FILE, "schedule.delay": 0, **options}
        else:
            words = {"schedule": self.schedule, **words, **options}
        return " ".join(quote(f"{key}={_in_hydra(value)}") for key, value in words.items())

    def _arguments(self) -> dict[str, Any]:
        """Arguments of the factory, without those that equal its own defaults."""
        wanted: dict[str, Any] = {"n": self.microbatches, "n_microbatches": self.microbatches}
        wanted |= {"n_stages": self.stages, "orders": list(self.orders)}
        wanted |= options_of(self.schedule) | self.given
        taken = inspect.signature(_factory(self.schedule)).parameters.items()
        return {k: wanted[k] for k, p in taken if k in wanted and wanted[k] != p.default}


@lru_cache(maxsize=64)
def _build(choice: Choice) -> Schedule:
    arguments = choice._arguments()
    check_sizes(choice.stages, choice.microbatches, choice.accumulate)
    if bool("".join(choice.orders).strip()) != (choice.schedule == OWN):
        raise UserError(
            f"schedule={OWN!r} takes orders, a line a rank such as 0F0 0F1 0B0 0B1, and no other"
            f" schedule does: got schedule={choice.schedule!r} and orders={choice.orders!r}"
        )
    built = _factory(choice.schedule)(**arguments)
    check_sizes(built.n_stages, built.n_workers, built.accumulate)
    return built


def check_sizes(stages: int, microbatches: int, accumulate: int | None = None) -> None:
    """Check that sizes can be drawn.

    Raises:
        UserError: one of them, or the micro-batches of all rounds, is not from 1 to 32.
    """
    rounds = 1 if accumulate is None else whole(accumulate, "accumulate", 1)
    sizes = {"stages": whole(stages, "stages", 1)}
    sizes["microbatches x accumulate"] = whole(microbatches, "microbatches", 1) * rounds
    for name, value in sizes.items():
        if value > LARGEST:
            raise UserError(f"{name} is at most {LARGEST} in a drawing: got {value}")


def choice_of(schedule: Schedule) -> Choice | None:
    """The choice that makes ``schedule``, under the same name if possible, or None."""
    alike = None
    for choice in _candidates(schedule):
        with suppress(ValueError):
            built = choice.build()
            # Rank orders have a placement of their own
            placement = schedule.placement if choice.schedule == OWN else built.placement
            if replace(built, name=schedule.name, placement=placement) == schedule:
                if built.name == schedule.name:
                    return choice
                alike = alike or choice
    return alike


def _candidates(schedule: Schedule) -> Iterator[Choice]:
    named = {name: getattr(schedule, name) for name in OPTIONS if hasattr(schedule, name)}
    orders: tuple[str, ...] = ()
    with suppress(ValueError):  # not a pipeline
        orders = tuple(line.replace(",", " ") for line in schedule.to_csv().splitlines())
    for name in SCHEDULES:
        options: dict[str, Any] = {k: v for k, v in named.items() if k in options_of(name)}
        options["orders"] = orders if name == OWN else ()
        yield Choice(name, schedule.n_stages, schedule.n_workers, **options)


def _in_hydra(value: Any) -> str:
    """``value`` in Hydra's grammar, without blanks."""
    if isinstance(value, RandomDelay):
        drawn = {key: x for key, x in asdict(value).items() if x is not None}
        return "{" + ",".join(f"{key}:{x}" for key, x in drawn.items()) + "}"
    return f"[{','.join(map(_in_hydra, value))}]" if isinstance(value, tuple) else str(value)

"""A method and its options as one value: an object, a line of Python, or overrides of Hydra."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from inspect import signature
from shlex import quote
from typing import Any

from toolkit.errors import UserError, suggest
from toolkit.schedule.catalog import METHODS, Method
from toolkit.schedule.correction import Correction
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import Delay, RandomDelay, plain

OWN = "your own"
ORDERS_FILE = "rank_orders.csv"
OPTIONS = (
    *("delay", "correction", "placement", "state", "n_ranks", "accumulate"),
    *("chains", "groups"),
)
SCHEDULES: Mapping[str, Method] = {
    **METHODS,
    OWN: Method(OWN, OWN, Schedule.from_rank_orders, "pipeline"),
}


def options_of(schedule: str) -> dict[str, Any]:
    """Options that ``schedule`` takes besides its sizes, with their defaults; None if required."""
    if schedule not in SCHEDULES:
        raise UserError(f"unknown schedule {schedule!r}: {suggest(str(schedule), [*SCHEDULES])}")
    method = SCHEDULES[schedule]
    parameters = signature(method.factory).parameters.items()
    defaults = {
        name: None if parameter.default is parameter.empty else parameter.default
        for name, parameter in parameters
        if name in OPTIONS
    }
    return {**defaults, **method.options}


@dataclass(frozen=True)
class Choice:
    """A schedule by name and options; None stands for the schedule's default."""

    schedule: str = "cdp_v2"  # a choice of conf/schedule, or "your own"
    stages: int = 4  # parts of the model, 1 or more; ignored with orders of your own
    microbatches: int = 4  # of a training step, or of one round where workers accumulate
    delay: Delay | None = None  # steps by which weights are late; a list, a matrix or "freshest"
    correction: str | Correction | None = None  # what is done about late weights
    placement: str | None = None  # the rank of each op
    state: str | None = None  # replicated, sharded or circulating
    n_ranks: int | None = None  # of interleaved 1F1B
    accumulate: int | None = None  # micro-batches of a worker, one after another in a step
    chains: str | None = None  # order of the ranks that sum a gradient
    groups: int | None = None  # of workers that start together
    orders: tuple[str, ...] = ()  # your own: one line a rank, such as "0F0 0F1 0B0 0B1"

    def __post_init__(self) -> None:
        if self.delay is not None:
            object.__setattr__(self, "delay", plain(self.delay))

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from the schedule's defaults; UserError for an unknown one."""
        defaults = options_of(self.schedule)
        chosen = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        for name, value in chosen.items():
            if name not in defaults:
                takes = ", ".join(defaults) or "only its sizes"
                raise UserError(f"{self.schedule} has no {name}, got {value!r}: it takes {takes}")
        return {name: value for name, value in chosen.items() if value != defaults[name]}

    def build(self) -> Schedule:
        """Build the schedule.

        Raises:
            UserError: an option or a size is refused, or the schedule is impossible; the message
                may end with a grid.
        """
        arguments = self._arguments()
        if bool("".join(self.orders).strip()) != (self.schedule == OWN):
            raise UserError(
                f"schedule={OWN!r} takes orders, a line a rank such as 0F0 0F1 0B0 0B1, and no"
                f" other schedule does: got schedule={self.schedule!r} and orders={self.orders!r}"
            )
        return SCHEDULES[self.schedule].factory(**arguments)

    def python(self) -> str:
        """Return a line of Python that makes the schedule by names of ``toolkit.schedule``."""
        factory = SCHEDULES[self.schedule].factory.__qualname__
        owner = "" if self.schedule == OWN else "catalog."
        arguments = ", ".join(f"{key}={value!r}" for key, value in self._arguments().items())
        return f"{owner}{factory}({arguments})"

    def overrides(self) -> str:
        """Options of ``experiments/simulate.py`` and ``train.py`` that make the schedule."""
        options = {f"schedule.{name}": value for name, value in self.given.items()}
        words: dict[str, Any] = {"schedule.file": ORDERS_FILE, "schedule.delay": 0}
        if self.schedule != OWN:
            words = {"schedule": self.schedule}
            words |= {"stages": self.stages, "microbatches": self.microbatches}
        return " ".join(
            quote(f"{name}={_in_hydra(value)}") for name, value in (words | options).items()
        )

    def _arguments(self) -> dict[str, Any]:
        """Arguments of the factory, without those that equal its own defaults."""
        arguments: dict[str, Any] = {"n": self.microbatches, "n_microbatches": self.microbatches}
        arguments |= {"n_stages": self.stages, "orders": list(self.orders)}
        arguments |= options_of(self.schedule) | self.given
        parameters = signature(SCHEDULES[self.schedule].factory).parameters.items()
        return {
            name: arguments[name]
            for name, parameter in parameters
            if name in arguments and arguments[name] != parameter.default
        }


def choice_of(schedule: Schedule) -> Choice:
    """Return the choice that makes ``schedule``, under the same name if possible.

    Raises:
        UserError: no choice makes it.
    """
    matches: list[tuple[Choice, Schedule]] = []
    for choice in _candidates(schedule):
        with suppress(UserError):
            built = choice.build()
            # Rank orders have a placement of their own
            placement = schedule.placement if choice.schedule == OWN else built.placement
            if replace(built, name=schedule.name, placement=placement) == schedule:
                matches.append((choice, built))
    if not matches:
        raise UserError(
            f"no choice makes {schedule!r}: choices are schedules of the catalogue, and rank orders"
            " that drain; toolkit.figures.schedules draws any"
        )
    return min(matches, key=lambda match: (match[1].name != schedule.name, len(match[0].given)))[0]


def phases_of(parts: Sequence[tuple[Schedule, int]]) -> str:
    """Options of ``experiments/train.py`` that train by one schedule after another.

    Args:
        parts: schedules and the training steps of each; the last continues.

    Raises:
        UserError: no choice makes one of them.
    """
    choices = [choice_of(schedule) for schedule, _ in parts]
    phases = []
    for choice, (_, n_steps) in zip(choices[:-1], parts, strict=False):
        options = {"schedule": choice.schedule, "steps": n_steps} | choice.given
        phases.append(
            "{" + ",".join(f"{name}:{_in_hydra(value)}" for name, value in options.items()) + "}"
        )
    phase_words = [quote(f"schedule.phases=[{','.join(phases)}]")] * bool(phases)
    return " ".join([choices[-1].overrides(), *phase_words])


def _candidates(schedule: Schedule) -> Iterator[Choice]:
    named = {name: getattr(schedule, name) for name in OPTIONS if hasattr(schedule, name)}
    orders: tuple[str, ...] = ()
    with suppress(UserError):  # not a pipeline
        orders = tuple(line.replace(",", " ") for line in schedule.to_csv().splitlines())
    for name in SCHEDULES:
        takes, n_workers = options_of(name), schedule.n_workers
        options: dict[str, Any] = {
            option: value for option, value in named.items() if option in takes
        }
        options["orders"] = orders if name == OWN else ()
        yield Choice(name, schedule.n_stages, n_workers, **options)
        for groups in range(1, n_workers) if "groups" in takes else ():
            yield Choice(name, schedule.n_stages, n_workers, groups=groups, **options)


def _in_hydra(value: Any) -> str:
    """Return ``value`` in Hydra's grammar, without blanks."""
    if isinstance(value, RandomDelay | Correction):
        fields = {key: entry for key, entry in asdict(value).items() if entry is not None}
        return "{" + ",".join(f"{key}:{entry}" for key, entry in fields.items()) + "}"
    return f"[{','.join(map(_in_hydra, value))}]" if isinstance(value, tuple) else str(value)

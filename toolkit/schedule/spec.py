"""A schedule as plain values: one form for Python, the command line, results and notebooks.

A :class:`ScheduleSpec` names a method of the catalogue and its options, or rank orders. Every
schedule that the catalogue builds carries its own, as ``schedule.spec``.
"""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from toolkit.errors import UserError, suggest
from toolkit.schedule.correction import Correction
from toolkit.schedule.phases import Phase, after
from toolkit.schedule.plain_options import (
    CATALOG,
    OF_FILES,
    OPTIONS,
    ORDERS_FILE,
    RANK_ORDERS,
    check_arguments,
    check_file_options,
    factory_of,
    from_mapping,
    in_hydra,
    method_of_call,
    options_of,
)
from toolkit.schedule.registry import FACTORIES, METHODS
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import Delay, RandomDelay, plain


@dataclass(frozen=True)
class ScheduleSpec:
    """A method and its options as plain values; None stands for the method's default.

    Equal specs build equal schedules: an option that equals its default is stored as None.

    Args:
        method: a name of :data:`toolkit.schedule.catalog.METHODS`, or :data:`RANK_ORDERS`.
        stages: parts of the model; ignored with rank orders.
        microbatches: of a training step; with ``accumulate``, of one round of the workers.
        delay: steps by which weights are late, as in :class:`Schedule`; a mapping has the
            arguments of a :class:`RandomDelay`.
        correction: what is done about late weights; a mapping has the arguments of a
            :class:`Correction`.
        placement: the rank of each op.
        state: ``replicated``, ``sharded`` or ``circulating``.
        n_ranks: devices of an interleaved pipeline.
        accumulate: micro-batches of a worker, one after another in a step.
        chains: order of the ranks that sum a gradient.
        groups: of workers that start together.
        orders: rank orders: a line a rank, such as ``"0F0 0F1 0B0 0B1"``.
        file: instead of ``orders``, the path of a CSV file that has them.
        period: slots between training steps of the file's orders.
        unfold: run overlapped pairs of the file one after the other.
        phases: what trains before it.

    Raises:
        UserError: there is no such method, or a mapping has other arguments.
    """

    method: str = "cdp_v2"
    stages: int = 4
    microbatches: int = 4
    delay: Delay | None = None
    correction: str | Correction | None = None
    placement: str | None = None
    state: str | None = None
    n_ranks: int | None = None
    accumulate: int | None = None
    chains: str | None = None
    groups: int | None = None
    orders: tuple[str, ...] = ()
    file: str | None = None
    period: int | None = None
    unfold: bool = False
    # In quotes, since phases have specs and specs have phases.
    phases: "tuple[PhaseSpec, ...]" = ()

    def __post_init__(self) -> None:
        defaults = options_of(self.method)
        values: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        values["delay"] = from_mapping(self.delay, RandomDelay)
        values["correction"] = from_mapping(self.correction, Correction)
        if values["delay"] is not None:
            values["delay"] = plain(values["delay"])
        # Equal schedules have equal specs, however their defaults were written.
        for name, value in values.items():
            is_default = name in defaults and value == defaults[name]
            object.__setattr__(self, name, None if is_default else value)

    @classmethod
    def from_call(cls, factory: str, arguments: Mapping[str, Any]) -> "ScheduleSpec":
        """Return the spec of a call of a method, or of a function of the catalogue.

        Args:
            factory: name of the function, such as ``cyclic``, or of a method, such as ``cdp_v1``.
            arguments: its arguments by name; ``phases`` may be among them, as descriptions.

        Raises:
            UserError: there is no such function, or it has no such argument.
        """
        if factory not in METHODS and factory not in FACTORIES:
            known_names = (*METHODS, *FACTORIES)
            raise UserError(
                f"unknown schedule {factory!r}: {suggest(str(factory), known_names)}"
            )
        values = dict(arguments)
        if "delay" in values:  # arrays do not compare
            values["delay"] = plain(from_mapping(values["delay"], RandomDelay))
        descriptions = values.pop("phases", None) or ()
        method = factory if factory in METHODS else method_of_call(factory, values)
        parameters = inspect.signature(METHODS[method].factory).parameters
        check_arguments(factory, method, values)
        # Methods of workers call their number n.
        microbatches = values.pop("n" if "n" in parameters else "n_microbatches")
        stages = values.pop("n_stages", parameters["n_stages"].default)
        if stages is None:  # as many as workers
            stages = microbatches
        sizes: dict[str, Any] = {"stages": stages, "microbatches": microbatches}
        return cls(method, **sizes, **values).after(descriptions)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "ScheduleSpec":
        """Return the spec that options of the group ``schedule`` of a configuration describe.

        Args:
            config: plain values; ``_target_`` is a function of the catalogue, unless ``file``
                names rank orders.

        Raises:
            UserError: it is no function of the catalogue, or options contradict each other.
        """
        check_file_options(config)
        values = {name: value for name, value in config.items() if name not in OF_FILES}
        file_options = {
            name: config.get(name, neutral) for name, neutral in OF_FILES.items()
        }
        target = str(values.pop("_target_", None))
        if file_options["file"] is None:
            return cls.from_call(target.removeprefix(CATALOG), values)
        descriptions = values.pop("phases", None) or ()
        of_orders = {
            name: values[name] for name in options_of(RANK_ORDERS) if name in values
        }
        return cls(RANK_ORDERS, **of_orders, **file_options).after(descriptions)

    @classmethod
    def of(cls, schedule: Schedule) -> "ScheduleSpec":
        """Return the spec that ``schedule`` carries, or that of its rank orders.

        Raises:
            UserError: it carries none, and rank orders do not make it.
        """
        if schedule.spec is not None:
            return schedule.spec
        with suppress(UserError):  # not a pipeline, or not as early as its orders allow
            rows = schedule.to_csv().splitlines()
            spec = cls(
                RANK_ORDERS,
                schedule.n_stages,
                schedule.n_microbatches,
                delay=schedule.delay,
                correction=schedule.correction,
                state=schedule.state,
                orders=tuple(" ".join(row.replace(",", " ").split()) for row in rows),
            )
            # Rank orders have a name and a placement of their own.
            built = replace(
                spec.build(), name=schedule.name, placement=schedule.placement
            )
            if built == schedule:
                return spec
        raise UserError(
            f"no spec makes {schedule!r}: specs are of methods of the catalogue, and of rank orders"
            " that drain; toolkit.figures.schedules draws any schedule"
        )

    def preceded_by(self, phases: Iterable[Phase]) -> "ScheduleSpec":
        """Return the same after ``phases``, whose schedules carry specs."""
        return replace(self, phases=tuple(PhaseSpec.of(phase) for phase in phases))

    def after(self, descriptions: Sequence[Mapping[str, Any]]) -> "ScheduleSpec":
        """Return the same after other schedules, which plain values describe.

        Args:
            descriptions: a mapping for each: ``schedule``, the name of a method; its ``steps`` or
                ``epochs``; and options of the method, by default those of this spec.

        Raises:
            UserError: one is no such mapping, or this schedule is impossible.
        """
        if not descriptions:
            return self
        return replace(self, phases=phases_of(self.build(), descriptions))

    @property
    def family(self) -> str:
        """``data_parallel``, ``cyclic`` or ``pipeline``."""
        return METHODS[self.method].kind if self.method in METHODS else "pipeline"

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from the method's defaults; UserError for an unknown one."""
        defaults = options_of(self.method)
        chosen: dict[str, Any] = {}
        for name in OPTIONS:
            value = getattr(self, name)
            if value is None:
                continue
            if name not in defaults:
                takes = ", ".join(defaults) or "only its sizes"
                raise UserError(
                    f"{self.method} has no {name}, got {value!r}: it takes {takes}"
                )
            chosen[name] = value
        return chosen

    def build(self) -> Schedule:
        """Build the schedule.

        Raises:
            UserError: an option or a size is refused, or the schedule is impossible; the message
                may end with a grid.
        """
        arguments = self._arguments()
        has_orders = bool("".join(self.orders).strip()) or self.file is not None
        if has_orders != (self.method == RANK_ORDERS):
            raise UserError(
                f"schedule={RANK_ORDERS!r} takes orders, a line a rank such as 0F0 0F1 0B0 0B1, and"
                f" no other schedule does: got schedule={self.method!r} and orders={self.orders!r}"
            )
        if self.file is not None:
            path = Path(self.file)
            schedule = Schedule.from_csv(path, name=path.stem, **arguments)
        else:
            schedule = factory_of(self.method)(**arguments)
        # The spec is of the last schedule alone: `after` adds those that the phases carry.
        schedule = schedule.with_spec(replace(self, phases=()))
        if self.phases:
            return after([phase.build() for phase in self.phases], schedule)
        return schedule

    def python(self) -> str:
        """Return a line of Python that makes the schedule by names of ``toolkit.schedule``."""
        arguments = [f"{name}={value!r}" for name, value in self._arguments().items()]
        if self.file is not None:
            maker, arguments = "Schedule.from_csv", [repr(self.file), *arguments]
        elif self.method == RANK_ORDERS:
            maker = "Schedule.from_rank_orders"
        else:
            maker = f"catalog.{factory_of(self.method).__name__}"
        return f"{maker}({', '.join(arguments)})"

    def overrides(self) -> str:
        """Return options of ``experiments/simulate.py`` and ``train.py`` that make the schedule."""
        words: dict[str, Any] = {}
        if self.method == RANK_ORDERS:
            words["schedule.file"] = self.file or ORDERS_FILE
            words["schedule.delay"] = 0
            if self.period is not None:
                words["schedule.period"] = self.period
            if self.unfold:
                words["schedule.unfold"] = True
        else:
            words["schedule"] = self.method
            words["stages"] = self.stages
            words["microbatches"] = self.microbatches
        words |= {f"schedule.{name}": value for name, value in self.given.items()}
        if self.phases:
            words["schedule.phases"] = tuple(phase.options() for phase in self.phases)
        return " ".join(
            quote(f"{name}={in_hydra(value)}") for name, value in words.items()
        )

    def _arguments(self) -> dict[str, Any]:
        """Arguments of the factory, without those that equal its own defaults."""
        if self.file is not None:
            orders_options: dict[str, Any] = {
                "period": self.period,
                "unfold": self.unfold,
            }
            changed = {name: value for name, value in orders_options.items() if value}
            return changed | self.given
        values: dict[str, Any] = {
            # Functions of workers call their number n; those of pipelines ask for micro-batches.
            "n": self.microbatches,
            "n_microbatches": self.microbatches,
            "n_stages": self.stages,
            "orders": list(self.orders),
        }
        values |= options_of(self.method) | self.given
        parameters = inspect.signature(factory_of(self.method)).parameters
        return {
            name: values[name]
            for name, parameter in parameters.items()
            if name in values and values[name] != parameter.default
        }


@dataclass(frozen=True)
class PhaseSpec:
    """A schedule for the first part of a training, as plain values.

    Args:
        spec: the schedule.
        steps: its training steps.
        epochs: or its epochs.
    """

    spec: ScheduleSpec
    steps: int | None = None
    epochs: float | None = None

    @classmethod
    def of(cls, phase: Phase) -> "PhaseSpec":
        """Return the spec of a phase; UserError if its schedule carries no spec."""
        return cls(ScheduleSpec.of(phase.schedule), phase.steps, phase.epochs)

    def build(self) -> Phase:
        """Build the phase; UserError if it is impossible."""
        return Phase(self.spec.build(), self.steps, self.epochs)

    def options(self) -> dict[str, Any]:
        """Return the mapping that describes it in ``schedule.phases``."""
        length = (
            {"epochs": self.epochs} if self.steps is None else {"steps": self.steps}
        )
        return {"schedule": self.spec.method} | length | self.spec.given


def phases_of(
    schedule: Schedule, descriptions: Sequence[Mapping[str, Any]]
) -> tuple[PhaseSpec, ...]:
    """Return the phases before ``schedule``; arguments and errors as :meth:`ScheduleSpec.after`."""
    if not isinstance(descriptions, Sequence) or isinstance(descriptions, str):
        raise UserError(
            f"phases: got {descriptions!r}; expected a list, as [{{schedule: dp, epochs: 1}}]"
        )
    phases = []
    for description in descriptions:
        if not isinstance(description, Mapping):
            raise UserError(
                f"phases: got {description!r}; expected {{schedule: NAME, epochs: 1}}, each"
            )
        lengths = {name: description.get(name) for name in ("steps", "epochs")}
        options = {
            name: value for name, value in description.items() if name not in lengths
        }
        phases.append(PhaseSpec(same_sized(schedule, options, "phases"), **lengths))
    return tuple(phases)


def same_sized(
    schedule: Schedule, described: Any, asked_by: str = "candidates"
) -> ScheduleSpec:
    """Return the spec of a method of as many stages, micro-batches and ranks as ``schedule``.

    Args:
        schedule: what gives the sizes, and the placement and state unless the method has its own.
        described: the name of a method; or a mapping of ``schedule``, its name, and its options.
        asked_by: the option whose value this is, for errors.

    Raises:
        UserError: there is no such method, or it has no such option.
    """
    name, options = described, {}
    if isinstance(described, Mapping):
        name = described.get("schedule")
        options = {key: value for key, value in described.items() if key != "schedule"}
    if name not in METHODS:
        raise UserError(
            f"{asked_by}: got {described!r}; expected the name of a method, or {{schedule: NAME}}"
            f" with options: {suggest(str(name), [*METHODS])}"
        )
    method = METHODS[name]
    sizes = {
        "n": schedule.n_workers,
        "n_stages": schedule.n_stages,
        "n_microbatches": schedule.n_microbatches,
        "placement": schedule.placement,
        "state": schedule.state,
        "accumulate": schedule.accumulate,
    }
    takes = inspect.signature(method.factory).parameters.keys() - method.options
    own_sizes = {size: value for size, value in sizes.items() if size in takes}
    return ScheduleSpec.from_call(name, own_sizes | options)

"""Schedules that follow one another in one training: data parallelism first, then CDP, say.

At a change the pipeline drains. The next schedule reads no version older than those that the one
before still held: after synchronous training theta_{t-1} is theta_t at the first step, as at the
start of a training. A rank keeps such a version until the change, or receives it there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any

from toolkit.errors import UserError, whole
from toolkit.schedule.instruction import Action, Buffer, Instruction, Op
from toolkit.schedule.program import Program
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.staleness import Staleness
from toolkit.schedule.timing import Timing

_HeldVersion = tuple[int, int, int | None]  # rank, stage, version


@dataclass(frozen=True)
class Phase:
    """A schedule for the first part of a training.

    Args:
        schedule: what it trains by.
        steps: its training steps, 1 or more.
        epochs: or its epochs, above 0; see :meth:`PhasedSchedule.in_steps`.

    Raises:
        UserError: both or neither are given, or one is out of range.
    """

    schedule: Schedule
    steps: int | None = None
    epochs: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UserError(
                f"a phase lasts for steps or for epochs: got steps={self.steps},"
                f" epochs={self.epochs}; give one of them"
            )
        if self.steps is not None:
            whole(self.steps, "steps of a phase", 1)
        elif isinstance(self.epochs, bool) or not isinstance(self.epochs, int | float):
            raise UserError(f"epochs of a phase are a number: got {self.epochs!r}")
        elif not 0 < self.epochs < float("inf"):
            raise UserError(f"epochs of a phase are above 0: got {self.epochs}")

    def __str__(self) -> str:
        length: float | None = self.steps
        unit = "step"
        if length is None:
            length = self.epochs
            unit = "epoch"
        if length != 1:
            unit += "s"
        return f"{length:g} {unit} of {self.schedule.name}"


@dataclass(frozen=True, repr=False)
class PhasedSchedule(Schedule):
    """A schedule that trains after others; its own fields are those of the last one.

    Make it by :func:`after`.

    Attributes:
        phases: the schedules before the last one, in order, and how long each trains.
    """

    phases: tuple[Phase, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        for phase in self.phases:
            for name in ("n_stages", "n_microbatches", "n_ranks"):
                own_size = getattr(self, name)
                phase_size = getattr(phase.schedule, name)
                if own_size != phase_size:
                    raise UserError(
                        f"schedules that follow one another have equal {name}: got {phase_size} of"
                        f" {phase.schedule.name} and {own_size} of {self.name}; choose another"
                        " placement, or other sizes"
                    )
        # One length of a slot, so that they make one program.
        ticks = self.timing.ticks_per_slot
        for phase in self.phases:
            ticks = lcm(ticks, phase.schedule.timing.ticks_per_slot)
        # All ticks grow alike, so what has been derived from the timing above stays as it is.
        self._set(timing=_finer(self.timing, ticks))

    def in_steps(self, steps_per_epoch: int) -> "PhasedSchedule":
        """Return the same with each phase's length in training steps, rounded to 1 or more."""
        phases = []
        for phase in self.phases:
            if phase.epochs is not None:
                phase = Phase(
                    phase.schedule, max(1, round(phase.epochs * steps_per_epoch))
                )
            phases.append(phase)
        return after(phases, self.final, self.name)

    @cached_property
    def _starts(self) -> tuple[tuple[int, Schedule], ...]:
        """The first step of each schedule, which reads no versions from before its time."""
        ticks = self.timing.ticks_per_slot
        first_step = 0
        previous = self.phases[0].schedule
        previous = replace(previous, timing=_finer(previous.timing, ticks))
        starts = [(first_step, previous)]
        following = [*(phase.schedule for phase in self.phases[1:]), self.final]
        for phase, schedule in zip(self.phases, following, strict=True):
            if phase.steps is None:
                raise UserError(
                    f"{phase}: its length in steps is unknown; give steps, or call"
                    " in_steps(steps_per_epoch)"
                )
            first_step += phase.steps
            first_versions = []
            for stage in range(self.n_stages):
                # Older versions no longer exist when the schedule begins; whoever would read one
                # reads the oldest that there is.
                first_versions.append(previous.oldest_version(stage, first_step))
            previous = replace(
                schedule,
                timing=_finer(schedule.timing, ticks),
                first_versions=tuple(first_versions),
            )
            starts.append((first_step, previous))
        return tuple(starts)

    @property
    def final(self) -> Schedule:
        """See :meth:`Schedule.final`."""
        last = Schedule(**_arguments(self))
        return last if self.spec is None else last.with_spec(self.spec.preceded_by(()))

    def at(self, step: int) -> Schedule:
        """Return the schedule of a training step."""
        return next(
            schedule for start, schedule in reversed(self._starts) if start <= step
        )

    def next_change(self, step: int) -> int | None:
        """Return the first step after ``step`` of another schedule; None if none follows."""
        return next((start for start, _ in self._starts if start > step), None)

    def oldest_version(self, stage: int, step: int) -> int:
        """See :meth:`Schedule.oldest_version`."""
        return self.at(step).oldest_version(stage, step)

    def first_holders(self, stage: int, step: int = 0) -> tuple[int, ...]:
        """See :meth:`Schedule.first_holders`."""
        return self.at(step).first_holders(stage, step)

    def delays(self, step: int) -> Staleness:
        """See :meth:`Schedule.delays`."""
        return self.at(step).delays(step)

    def version(self, stage: int, microbatch: int, step: int) -> int:
        """See :meth:`Schedule.version`."""
        return self.at(step).version(stage, microbatch, step)

    def read_by(self, op: Op, version: int, step: int) -> Buffer | None:
        """See :meth:`Schedule.read_by`."""
        return self.at(step).read_by(op, version, step)

    def rank(self, stage: int, microbatch: int, step: int = 0) -> int:
        """See :meth:`Schedule.rank`."""
        return self.at(step).rank(stage, microbatch, step)

    def lower(self, n_steps: int, first_step: int = 0) -> Program:
        """See :meth:`Schedule.lower`; one program across changes."""
        first = whole(first_step, "first_step of a program", 0)
        end = first + whole(n_steps, "n_steps, the training steps of a program,", 1)
        bounds = pairwise((first, *self.changes(range(first, end)), end))
        programs = [self.at(step).lower(until - step, step) for step, until in bounds]
        return programs[0] if len(programs) == 1 else self._joined(programs)

    def _joined(self, programs: Sequence[Program]) -> Program:
        # Programs one after another, and between them what their weights need at the change:
        #
        #     program 0 | send, receive and free weights | program 1, its ticks from `end` on
        #             end
        #
        ranks = [[*instructions] for instructions in programs[0].ranks]
        end = _end(programs[0])
        changes = []
        for previous, following in pairwise(programs):
            _hand_over(
                ranks, previous.schedule, following.schedule, following.first_step, end
            )
            changes.append(end)
            for rank_instructions, next_instructions in zip(
                ranks, following.ranks, strict=True
            ):
                rank_instructions += [
                    i._replace(tick=i.tick + end) for i in next_instructions
                ]
            end += _end(following)
        return Program(
            schedule=self,
            n_steps=sum(program.n_steps for program in programs),
            ranks=tuple(map(tuple, ranks)),
            first_step=programs[0].first_step,
            changes=tuple(changes),
        )


def after(
    phases: Sequence[Phase | tuple[Schedule, int]], schedule: Schedule, name: str = ""
) -> PhasedSchedule:
    """Train by ``phases``, one after another, and then by ``schedule``.

    Args:
        phases: a :class:`Phase` each, or a pair of a schedule and its training steps.
        schedule: the last; all have equal numbers of stages, micro-batches and ranks.
        name: name in tables and figures; by default, from those of its parts.

    Raises:
        UserError: sizes differ, a length is out of range, or a schedule has phases itself.
    """
    earlier_phases = tuple(
        phase if isinstance(phase, Phase) else Phase(*phase) for phase in phases
    )
    schedules = [schedule, *(phase.schedule for phase in earlier_phases)]
    if not earlier_phases or any(
        isinstance(each, PhasedSchedule) for each in schedules
    ):
        raise UserError(
            "phases: give one or more, of schedules that have no phases themselves"
        )
    arguments = _arguments(schedule)
    arguments["name"] = (
        name or f"{schedule.name} after {', '.join(map(str, earlier_phases))}"
    )
    phased = PhasedSchedule(**arguments, phases=earlier_phases)
    if schedule.spec is not None and all(each.spec is not None for each in schedules):
        phased._set(spec=schedule.spec.preceded_by(earlier_phases))
    return phased


def switched(schedule_plan: Schedule, step: int, schedule: Schedule) -> Schedule:
    """Train by ``schedule_plan`` until ``step``, and by ``schedule`` from there on.

    Args:
        schedule_plan: the schedule of the training so far, with phases or without.
        step: the first training step by ``schedule``; later changes of the plan are left out.
        schedule: without phases; of as many stages, micro-batches and ranks.

    Raises:
        UserError: as :func:`after`.
    """
    before = [phase.schedule for phase in getattr(schedule_plan, "phases", ())]
    starts = [
        0,
        *schedule_plan.changes(range(step)),
        whole(step, "step of a change", 0),
    ]
    lengths = (end - start for start, end in pairwise(starts))
    if step == 0:
        return schedule
    # Phases that would begin at `step` or later are left out.
    phases = [*zip([*before, schedule_plan.final], lengths, strict=False)]
    return after(phases, schedule, schedule.name)


def _arguments(schedule: Schedule) -> dict[str, Any]:
    """Return the arguments that make ``schedule``, without its phases."""
    return {f.name: getattr(schedule, f.name) for f in fields(Schedule) if f.init}


def _finer(timing: Timing, ticks_per_slot: int) -> Timing:
    """Return the same timing in shorter ticks."""
    factor = ticks_per_slot // timing.ticks_per_slot
    if factor == 1:
        return timing
    starts = {op: factor * start for op, start in timing.starts.items()}
    return Timing(starts, factor * timing.period, ticks_per_slot)


def _end(program: Program) -> int:
    """Return the tick after which every rank has finished, at the start of a slot."""
    # n_slots counts until the last instruction's tick; an op that begins there takes one slot more.
    return (program.n_slots + 1) * program.schedule.timing.ticks_per_slot


def _hand_over(
    ranks: list[list[Instruction]],
    previous: Schedule,
    following: Schedule,
    step: int,
    tick: int,
) -> None:
    """Let ``ranks`` hold at ``tick`` what ``following`` reads from ``step`` on, and no more.

    Args:
        ranks: ``[rank]``, its instructions so far, which are changed.
        previous: the schedule that ends.
        following: the schedule that begins.
        step: the first training step of ``following``.
        tick: when it begins; all instructions before have finished.
    """
    obtained, freed_at = _versions_of_ranks(ranks)

    # A rank that had a version which it needs does not free it; the owner, which made it, sends it
    # to the other ranks; and ranks that do not need a version free it.
    dropped_frees: set[tuple[int, int]] = set()
    for stage, owner in enumerate(previous.owners):
        holders = following.first_holders(stage)
        for version in following.versions(stage, step):
            message = (stage, None, None, version, Buffer.WEIGHTS)
            lacking_ranks = [
                rank for rank in holders if (rank, stage, version) not in obtained
            ]
            keeping_ranks = {*holders} - {*lacking_ranks}
            if lacking_ranks:
                keeping_ranks.add(owner)
            for rank in keeping_ranks:
                key = (rank, stage, version)
                if key in freed_at:
                    dropped_frees.add((rank, freed_at.pop(key)))
            for rank in lacking_ranks:
                ranks[owner].append(Instruction(tick, Action.SEND, *message, (rank,)))
                ranks[rank].append(Instruction(tick, Action.RECV, *message, (owner,)))
            for rank in {*range(len(ranks))} - {*holders}:
                key = (rank, stage, version)
                if key in obtained and key not in freed_at:
                    ranks[rank].append(Instruction(tick, Action.FREE, *message))
    for rank, instructions in enumerate(ranks):
        instructions[:] = [
            i
            for position, i in enumerate(instructions)
            if (rank, position) not in dropped_frees
        ]


def _versions_of_ranks(
    ranks: Sequence[Sequence[Instruction]],
) -> tuple[set[_HeldVersion], dict[_HeldVersion, int]]:
    """Return the versions that each rank has had, and where it freed those that it lacks now."""
    obtained: set[_HeldVersion] = set()
    freed_at: dict[_HeldVersion, int] = {}
    for rank, instructions in enumerate(ranks):
        for position, i in enumerate(instructions):
            key = rank, i.stage, i.version
            if i.action == Action.FREE and i.buffer == Buffer.WEIGHTS:
                obtained.add(key)
                freed_at[key] = position
            elif i.action == Action.UPDATE or (
                i.buffer == Buffer.WEIGHTS and i.leaves(rank)
            ):
                obtained.add(key)
                # Held again: an earlier free says nothing of the end.
                freed_at.pop(key, None)
    return obtained, freed_at

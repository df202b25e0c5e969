"""A schedule in its steady state: one period in which neither start nor end is felt."""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

from toolkit.schedule.schedule import Schedule
from toolkit.schedule.traffic import Traffic, units_sent


@dataclass(frozen=True)
class SteadyState:
    """One period of the steady state; or the fewest periods that are a whole number of slots.

    Where ranks take turns from step to step (``per_stage_and_microbatch``), periods differ by some
    messages of the steps beside; :func:`~toolkit.schedule.footprint.footprint` counts those of one
    step, which are constant.

    Attributes:
        activations: ``[slot][rank]``, stage-activations alive during the slot.
        total_activations: ``[slot]``, the most that all ranks hold together during it.
        traffic: ``[slot][rank]``, parameter messages sent as the slot begins.
        weights: ``[rank]``, the most stage-parameters held at once: all versions, and predictions.
    """

    activations: tuple[tuple[int, ...], ...]
    total_activations: tuple[int, ...]
    traffic: tuple[tuple[Traffic, ...], ...]
    weights: tuple[int, ...]

    @property
    def peak_activations(self) -> int:
        """The most stage-activations that all ranks together hold."""
        return max(self.total_activations)

    @property
    def units_by_slot(self) -> tuple[Fraction, ...]:
        """What all ranks together send in each slot, in stage-parameters."""
        return units_sent(self.traffic)


def settled_steps(schedule: Schedule) -> int:
    """Training steps until the steady state, at a step that starts with a slot."""
    steps = schedule.timing.steps_under_way + schedule.max_staleness + 1
    return -(-steps // _whole(schedule)) * _whole(schedule)


def _whole(schedule: Schedule) -> int:
    """The fewest periods that make a whole number of slots: usually one."""
    timing = schedule.timing
    return timing.ticks_per_slot // gcd(timing.period, timing.ticks_per_slot)


def steady_steps(schedule: Schedule, n_steps: int) -> range:
    """The training steps, of ``n_steps``, that are in the steady state.

    With staleness d there are d + 1 interleaved sequences of updates, which may run at different
    speeds, so a whole multiple of d + 1 steps is returned. If there are too few, all but the first
    step and those that overlap the last; possibly an empty range.
    """
    first, threads = settled_steps(schedule) + 1, schedule.max_staleness + 1
    end = n_steps - _unlike_others_at_the_end(schedule)
    rounds = max(0, end - first) // threads
    return range(first, first + rounds * threads) if rounds else range(1, max(1, end))


def steps_to_time(schedule: Schedule, timed: int = 4) -> int:
    """The fewest training steps with ``timed`` steady ones, rounded up as in steady_steps."""
    threads = schedule.max_staleness + 1
    rounds = -(-timed // threads)
    return settled_steps(schedule) + 1 + rounds * threads + _unlike_others_at_the_end(schedule)


def _unlike_others_at_the_end(schedule: Schedule) -> int:
    """Training steps at a program's end that overlap too few, or whose weights nobody reads."""
    return max(schedule.timing.steps_under_way - 1, schedule.max_staleness)


def steady_slots(schedule: Schedule, step: int) -> slice:
    """The slots from the start of ``step``, a settled one, to the next step that starts a slot."""
    timing, end = schedule.timing, step + _whole(schedule)
    return slice(*(at * timing.period // timing.ticks_per_slot for at in (step, end)))


def steady_state(schedule: Schedule) -> SteadyState:
    """One period of ``schedule``, once every older step has ended and before the last begins.

    Where delays are random, traffic is that of one step as it was drawn; no other is quite like it.
    """
    settled = settled_steps(schedule)
    program = schedule.lower(settled + schedule.max_staleness + 1 + _whole(schedule))
    slots = steady_slots(schedule, settled)
    held = (of_rank[slots] for of_rank in program.activations())
    traffic = program.traffic(range(slots.start, slots.stop))
    together = program.total_activations()[slots]
    return SteadyState(tuple(zip(*held, strict=True)), together, traffic, program.peak_weights())

"""A schedule in its steady state: one period, and what a training step asks of each rank."""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from math import gcd

from toolkit.schedule.instruction import Action, Buffer, Instruction
from toolkit.schedule.program import Program
from toolkit.schedule.replay import replay
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.traffic import (
    Traffic,
    rounds,
    total_traffic,
    traffic_of,
    units_sent,
)


@dataclass(frozen=True)
class SteadyState:
    """One period of the steady state; or the fewest periods that are a whole number of slots.

    If ranks take turns from step to step (``per_stage_and_microbatch``), periods differ by some
    messages of adjacent steps; :func:`footprint` counts those of one step, which are constant.

    Attributes:
        activations: ``[slot][rank]``, stage-activations alive.
        total_activations: ``[slot]``, the most of all ranks at one moment.
        traffic: ``[slot][rank]``, weights and gradients sent as the slot begins.
        weights: ``[rank]``, the most stage-parameters: all versions, and predictions.
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


@dataclass(frozen=True)
class Footprint:
    """One row of the paper's comparison. Activations in micro-batches, parameters in models."""

    ranks: int
    activations: Fraction  # the most of one rank
    total_activations: Fraction  # the most of all ranks together
    parameters: Fraction  # the most that one rank keeps: one version of its stages
    # The most that one rank holds, with older versions and those in transit.
    weights: Fraction
    # Parameters and gradients that a rank sends in a step, on average.
    traffic: Fraction
    messages: Fraction  # that carry them
    traffic_in_slot: Fraction  # the most that a rank sends in a slot
    # The longest row of messages that wait for each other between two slots.
    rounds: int


def settled_steps(schedule: Schedule) -> int:
    """Return the training steps until the steady state, at a step that starts with a slot."""
    # Until then fewer steps overlap than later on, and version 0 stands for older ones: ranks hold
    # fewer versions than in the steady state.
    steps = schedule.timing.steps_under_way + schedule.max_staleness + 1
    return -(-steps // _whole(schedule)) * _whole(schedule)


def _whole(schedule: Schedule) -> int:
    """Return the fewest periods that make a whole number of slots: usually one."""
    timing = schedule.timing
    # A period of 8 ticks with 3 a slot: three periods are 8 slots, and no fewer are a whole number.
    return timing.ticks_per_slot // gcd(timing.period, timing.ticks_per_slot)


def steady_steps(schedule: Schedule, n_steps: int, first_step: int = 0) -> range:
    """Return which of ``n_steps`` training steps from ``first_step`` on are in the steady state.

    They count from ``first_step``. Where schedules follow one another, those of the last.

    Staleness d makes d + 1 interleaved sequences of updates, which may differ in speed, so this is
    a whole multiple of d + 1 steps. If there are too few, all but the first step and those that
    overlap the last; possibly none.
    """
    changes = schedule.changes(range(first_step, first_step + n_steps))
    begin = changes[-1] - first_step if changes else 0
    schedule = schedule.at(first_step + begin)
    n_sequences = schedule.max_staleness + 1
    # One more, since a step's time counts from the end of the step before: that one is settled,
    # too.
    first = begin + settled_steps(schedule) + 1
    end = n_steps - _unsteady_end(schedule)
    n_rounds = max(0, end - first) // n_sequences
    if n_rounds:
        return range(first, first + n_rounds * n_sequences)
    return range(begin + 1, max(begin + 1, end))


def steps_to_time(schedule: Schedule, timed: int = 4) -> int:
    """Return the fewest training steps for which :func:`steady_steps` returns ``timed`` or more."""
    changes = schedule.changes(range(sys.maxsize))
    begin = changes[-1] if changes else 0
    schedule = schedule.final
    n_sequences = schedule.max_staleness + 1
    n_rounds = -(-timed // n_sequences)
    first = begin + settled_steps(schedule) + 1
    return first + n_rounds * n_sequences + _unsteady_end(schedule)


def _unsteady_end(schedule: Schedule) -> int:
    """Return how many last steps overlap too few others, or make weights that nobody reads."""
    return max(schedule.timing.steps_under_way - 1, schedule.max_staleness)


def steady_slots(schedule: Schedule, step: int) -> slice:
    """Return the slots from a settled ``step`` to the next step that starts with a slot."""
    timing = schedule.timing
    start_tick = step * timing.period
    end_tick = (step + _whole(schedule)) * timing.period
    return slice(start_tick // timing.ticks_per_slot, end_tick // timing.ticks_per_slot)


def steady_state(schedule: Schedule) -> SteadyState:
    """Return one period of ``schedule`` in the steady state.

    Args:
        schedule: any schedule; of phases, the last counts. A random delay is one draw of it.
    """
    schedule = schedule.final
    settled = settled_steps(schedule)
    # Weights are sent for later steps: without steps that read them, the period would send less.
    program = schedule.lower(settled + schedule.max_staleness + 1 + _whole(schedule))
    slots = steady_slots(schedule, settled)
    activations_of_ranks = [in_slots[slots] for in_slots in program.activations()]
    activations = zip(*activations_of_ranks, strict=True)
    traffic = program.traffic(range(slots.start, slots.stop))
    total = program.total_activations()[slots]
    return SteadyState(tuple(activations), total, traffic, program.peak_weights())


def footprint(schedule: Schedule) -> Footprint:
    """Count from a verified program in the steady state; random delays are one draw."""
    schedule = schedule.final
    settled = settled_steps(schedule)
    # The settled step is in the middle. Messages of its gradient and of its weights may stand in
    # steps before and after it, which are all in the program.
    program = schedule.lower(2 * settled + 1).verify()
    slots = steady_slots(schedule, settled)
    stage_share = Fraction(1, schedule.n_stages)
    stages_held: Counter[int] = Counter()  # by rank
    for stage in range(schedule.n_stages):
        stages_held.update(schedule.first_holders(stage))
    sent_of_step = []
    for rank, instructions in enumerate(program.ranks):
        sent_of_step += [
            traffic_of(i, rank) for i in instructions if belongs_to(i, settled)
        ]
    sent = total_traffic(sent_of_step)
    peak_activations = max(max(in_slots[slots]) for in_slots in program.activations())
    peak_units = max(
        sent.units for sent in chain.from_iterable(program.traffic()[slots])
    )
    return Footprint(
        ranks=schedule.n_ranks,
        activations=peak_activations * stage_share,
        total_activations=max(program.total_activations()[slots]) * stage_share,
        parameters=max(stages_held.values()) * stage_share,
        weights=max(program.peak_weights()) * stage_share,
        traffic=sent.units * stage_share / schedule.n_ranks,
        messages=Fraction(sent.messages, schedule.n_ranks),
        traffic_in_slot=peak_units * stage_share,
        rounds=_rounds(program),
    )


def belongs_to(i: Instruction, step: int) -> bool:
    """Whether ``i`` moves the gradient of ``step``, or the newest weights that it reads."""
    if i.buffer == Buffer.GRADIENT:
        return i.step == step
    return i.buffer == Buffer.WEIGHTS and i.version == step


def _rounds(program: Program) -> int:
    """Return the most messages of one stage that wait for each other at one tick."""
    # Messages take no time in a program. Those of one tick that wait for each other make a row: a
    # receive is one longer than its sender's, a collective longer than the longest of its members'.
    depth: defaultdict[tuple[int, int], int] = defaultdict(int)
    tick = longest = 0
    for rank, i in replay(program.ranks):
        if i.tick != tick:
            tick = i.tick
            depth.clear()
        if not i.moves_parameters:
            continue
        key = (rank, i.stage)
        if i.action == Action.RECV:
            depth[key] = max(depth[key], depth[i.peers[0], i.stage] + 1)
        # The replay yields a collective for each of its ranks: only the root counts it, for all.
        elif i.action != Action.SEND and rank == i.peers[0]:
            depth_before = max(depth[peer, i.stage] for peer in i.peers)
            depth_after = depth_before + rounds(i.action, len(i.peers))
            depth.update({(peer, i.stage): depth_after for peer in i.peers})
        longest = max(longest, depth[key])
    return longest

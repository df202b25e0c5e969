"""What a schedule asks of each rank in one training step, counted from its program."""

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction

from toolkit.schedule.instruction import Action, Buffer, Instruction
from toolkit.schedule.program import Program
from toolkit.schedule.replay import replay
from toolkit.schedule.schedule import Schedule
from toolkit.schedule.steady import settled_steps, steady_slots
from toolkit.schedule.traffic import rounds, together, traffic_of


@dataclass(frozen=True)
class Footprint:
    """One row of the paper's comparison. Activations in micro-batches, parameters in models.

    Attributes:
        ranks: devices.
        activations: the most that one rank holds.
        total_activations: the most that all ranks hold together.
        parameters: the most that one rank keeps from step to step: one version of each of its
            stages.
        weights: the most weights that one rank holds at once, older versions and those passing
            through included.
        traffic: parameters and gradients that a rank sends in a step, on average.
        messages: of parameters and gradients that a rank sends in a step, on average.
        traffic_in_slot: the most that a rank sends in a slot.
        rounds: the longest row of messages, each waiting for the one before, between two slots.
    """

    ranks: int
    activations: Fraction
    total_activations: Fraction
    parameters: Fraction
    weights: Fraction
    traffic: Fraction
    messages: Fraction
    traffic_in_slot: Fraction
    rounds: int


def footprint(schedule: Schedule) -> Footprint:
    """Count from a verified program, in the steady state; where delays are random, as drawn."""
    settled = settled_steps(schedule)
    program = schedule.lower(2 * settled + 1).verify()
    slots = steady_slots(schedule, settled)
    stage = Fraction(1, schedule.n_stages)
    activations = [held[slots] for held in program.activations()]
    kept = [0] * schedule.n_ranks
    for j in range(schedule.n_stages):
        for rank in schedule.first_holders(j):
            kept[rank] += 1
    traffic = program.traffic()[slots]
    sent = together(
        [
            traffic_of(i, rank)
            for rank, instructions in enumerate(program.ranks)
            for i in instructions
            if belongs_to(i, settled)
        ]
    )
    return Footprint(
        ranks=schedule.n_ranks,
        activations=max(map(max, activations)) * stage,
        total_activations=max(program.total_activations()[slots]) * stage,
        parameters=max(kept) * stage,
        weights=max(program.peak_weights()) * stage,
        traffic=sent.units * stage / schedule.n_ranks,
        messages=Fraction(sent.messages, schedule.n_ranks),
        traffic_in_slot=max(of_rank.units for slot in traffic for of_rank in slot) * stage,
        rounds=_rounds(program),
    )


def belongs_to(i: Instruction, step: int) -> bool:
    """Whether ``i`` moves the gradient of ``step``, or the newest weights that it reads."""
    if i.buffer == Buffer.GRADIENT:
        return i.step == step
    return i.buffer == Buffer.WEIGHTS and i.version == step


def _rounds(program: Program) -> int:
    """Messages of one stage that wait for each other at the same tick."""
    depth: defaultdict[tuple[int, int], int] = defaultdict(int)
    now = most = 0
    for rank, i in replay(program.ranks):
        if i.tick != now:
            now = i.tick
            depth.clear()
        if i.buffer not in (Buffer.GRADIENT, Buffer.WEIGHTS):
            continue
        at = (rank, i.stage)
        if i.action == Action.RECV:
            depth[at] = max(depth[at], depth[i.peers[0], i.stage] + 1)
        elif i.action != Action.SEND and i.action != Action.FREE and rank == i.peers[0]:
            before = max(depth[peer, i.stage] for peer in i.peers)
            reached = before + rounds(i.action, len(i.peers))
            depth.update({(peer, i.stage): reached for peer in i.peers})
        most = max(most, depth[at])
    return most

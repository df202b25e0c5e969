"""Predict when every instruction of a program runs, from stage costs and hardware.

Time: each rank has a compute lane, an optimizer and a full-duplex port that work in parallel; ranks
of a machine share its port to others. Ops run in program order, each when the previous op has ended
and its inputs have arrived. A weight prediction runs before the op that reads it; a stage updates
when its gradient is complete. A message starts when its content is ready, both ports are free and
both ranks are within the schedule's lookahead; of those that can start, the first in the program
does; or, if ``hardware.shared_ports``, messages of different pairs share the bandwidth of a port. A
collective takes both ports of all its ranks, in program order. Only a rank that begins with
stage 0 waits for a clock, so that workers keep their stagger.

Memory: weights, activations, gradients, optimizer state if given, stage inputs from arrival to
backward, and workspace of running ops and of values between stages. What BACKWARD_INPUT leaves for
BACKWARD_WEIGHT is not counted. A recomputing stage holds its activations during its backward (its
first half, if split), which takes longer by one forward.

Cost: one event per instruction, in order of time: see :mod:`toolkit.cost.event_queue`.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from math import inf

from toolkit.cost.event_queue import EventQueue, Ports
from toolkit.cost.hardware import Hardware, check_hardware
from toolkit.cost.stage_costs import Costs, moved_bytes
from toolkit.cost.timeline import (
    ACTIVATIONS,
    COMPUTE,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    RECEIVE,
    SEND,
    UPDATE,
    WEIGHTS,
    WORKING,
    Change,
    Span,
    Timeline,
)
from toolkit.errors import UserError
from toolkit.schedule import Action, Buffer, Instruction, Kind, Program, Schedule
from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    LETTERS,
    collector_paused,
)
from toolkit.schedule.steady_state import steady_steps
from toolkit.schedule.traffic import traffic_of


def simulate(
    program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float] = ()
) -> Timeline:
    """Return the predicted timeline of ``program``.

    Args:
        program: a verified program.
        costs: one entry per stage.
        hardware: seconds of messages, and of kernels that were not measured.
        optimizer_bytes: optimizer state in bytes, by stage, held by the ranks that update it and
            read and written by each update. Empty: no memory, and the time of one momentum.

    Raises:
        UserError: wrong types, or entries that do not match the program's stages and ranks.
    """
    _check(program, costs, hardware, optimizer_bytes)
    with collector_paused():
        simulation = _Simulation(program, costs, hardware, optimizer_bytes)
        simulation.run()
    return simulation.timeline()


_Use = tuple[int, str, float, int | None]  # rank, lane, bytes, other end
_new = tuple.__new__  # of many named tuples: their own constructors take twice as long
_FROM_OUTPUT = (BACKWARD, BACKWARD_INPUT)  # start from the output's gradient


def _check(
    program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
) -> None:
    if not isinstance(program, Program):
        raise UserError(
            f"simulate takes a Program: got a {type(program).__name__}; lower the schedule with"
            " schedule.lower(n_steps).verify()"
        )
    check_hardware(hardware)
    n_stages, n_ranks = program.schedule.n_stages, len(program.ranks)
    for name, entries, n_expected, unit in (
        ("costs", costs, n_stages, "stages"),
        ("optimizer_bytes", optimizer_bytes or costs, n_stages, "stages"),
        ("hardware.speeds", hardware.speeds[:n_ranks] or program.ranks, n_ranks, "ranks"),
        ("hardware.memories", hardware.memories[:n_ranks] or program.ranks, n_ranks, "ranks"),
    ):
        if len(entries) != n_expected:
            raise UserError(
                f"{name} needs an entry for each of {n_expected} {unit}: got {len(entries)}"
            )


class _Simulation:
    """Spans of instructions, and changes of the memory that ranks hold."""

    def __init__(
        self, program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
    ) -> None:
        schedule, n_ranks = program.schedule, len(program.ranks)
        self.program = program
        self.costs = costs
        self.hardware = hardware
        self.events = EventQueue(program, shared=hardware.shared_ports)
        self.overlaps = bool(self.events.pairs)
        self.under_way: dict[int, tuple[float, float]] = {}  # by rank: a pair's backward
        self.slot = schedule.timing.ticks_per_slot
        self.spans: list[Span] = []
        self.changes: list[Change] = []
        self.step_ends: dict[int, float] = {}
        # Of each stage
        self.seconds = [cost.op_seconds(hardware) for cost in costs]
        self.speeds = [hardware.speed(rank) for rank in range(n_ranks)]
        self.machines = [hardware.machine(rank) for rank in range(n_ranks)]
        self.working = [cost.working_bytes for cost in costs]
        self.kept = [cost.kept_bytes for cost in costs]
        self.moved = moved_bytes(costs)
        # [local][buffer][stage], seconds of a message
        self.messages = [
            {
                buffer: [hardware.message(n_bytes, local=local) for n_bytes in bytes_of_stage]
                for buffer, bytes_of_stage in moved_items
            }
            for moved_items in [self.moved.items()]
            for local in (False, True)
        ]
        states: Sequence[float | None] = optimizer_bytes or [None] * len(costs)
        self.moved_by_update = [
            cost.update_bytes(state_bytes) for cost, state_bytes in zip(costs, states, strict=True)
        ]
        self.since = program.first_step  # the first step of the schedule that runs
        self.computed = self._starts(schedule.at(program.first_step), 0)  # ends of ops, by rank
        self.boundaries: dict[tuple, float] = {}  # when each is there, where it is
        self.inputs: dict[tuple, float] = {}  # bytes of the inputs that stages keep
        self.parts: defaultdict[tuple, list[float]] = defaultdict(list)  # when sums have them
        for rank in range(n_ranks if optimizer_bytes else 0):
            for stage in program.updated(rank):
                self._hold(0.0, rank, OPTIMIZER, optimizer_bytes[stage])
        for stage in range(schedule.n_stages):
            n_bytes = (
                len(schedule.versions(stage, program.first_step)) * costs[stage].parameter_bytes
            )
            for rank in schedule.first_holders(stage, program.first_step):
                self._hold(0.0, rank, WEIGHTS, n_bytes)

    def run(self) -> None:
        """Run all instructions, from each change of the schedule to the next."""
        begin = dict.fromkeys(Action, self._meet) | {
            **dict.fromkeys(map(Action, Kind), self._compute),
            Action.SEND: self._message,
            Action.UPDATE: self._update,
            Action.PREDICT: self._predict,
            Action.FREE: self._free,
        }
        since = 0.0
        for change in self.program.changes:
            self.events.run(begin, change, since)
            since = self.drain(change)
        self.events.run(begin, inf, since)

    def timeline(self) -> Timeline:
        """Return the timeline of all instructions that have run."""
        ends = tuple(self.step_ends[step] for step in sorted(self.step_ends))
        schedule, n_ranks = self.program.schedule, len(self.program.ranks)
        steady_range = steady_steps(schedule, len(ends), self.program.first_step)
        return Timeline(schedule.name, n_ranks, self.spans, self.changes, ends, steady_range)

    def _starts(self, schedule: Schedule, tick: int) -> list[float]:
        """Return the earliest start of each rank from ``tick`` on.

        A rank that begins with stage 0 starts as in ``schedule``, so that workers keep their
        stagger; any other rank starts when its inputs arrive.
        """
        timing, first_ticks = schedule.timing, self.program.first_forwards(tick)
        busy_seconds = [0.0] * len(self.program.ranks)  # seconds of compute in a training step
        for op in timing.starts if any(first_ticks.values()) else ():
            rank = schedule.rank(op.stage, op.microbatch)
            busy_seconds[rank] += self.seconds[op.stage][op.kind] / self.speeds[rank]
        starts = [0.0] * len(busy_seconds)
        for rank, start in first_ticks.items():
            starts[rank] = start / timing.period * max(busy_seconds)
        return starts

    def drain(self, tick: int) -> float:
        """Return when every rank has finished, before the next schedule begins at ``tick``."""
        step = self.program.schedule.next_change(self.since)
        assert step is not None
        self.since, end = step, max(span.end for span in self.spans)
        starts = self._starts(self.program.schedule.at(step), tick)
        self.computed = [end + start for start in starts]
        return end

    def _compute(self, g: int, rank: int, i: Instruction, ready: float) -> None:
        """Run an op once the rank is free and its inputs have arrived at ``ready`` seconds."""
        tick, action, stage, microbatch, step, *_ = i
        start = self.computed[rank]
        if ready > start:
            start = ready
        if action == FORWARD and stage > 0:
            produced_at = self.boundaries.pop((ACTIVATION, stage - 1, microbatch, step))
            if (rank, stage, microbatch, step) not in self.inputs:  # produced on this rank
                n_bytes = self.costs[stage].extra_input_bytes
                self.inputs[rank, stage, microbatch, step] = n_bytes
                self._hold(produced_at, rank, INPUTS, n_bytes)
        elif action in _FROM_OUTPUT and stage < len(self.costs) - 1:
            arrived_at = self.boundaries.pop((ACTIVATION_GRADIENT, stage + 1, microbatch, step))
            self._work(rank, arrived_at, start, self.moved[ACTIVATION_GRADIENT][stage + 1])
        seconds = self.seconds[stage][action] / self.speeds[rank]
        span_end = end = start + seconds
        if self.overlaps:
            start, span_end, end = self._overlapped(g, rank, start, seconds)
        self.computed[rank] = end
        name, slot = f"{stage}{LETTERS[action]}{microbatch}", tick // self.slot
        span = (rank, COMPUTE, start, span_end, name, stage, microbatch, step, 0.0, None, slot)
        self.spans.append(_new(Span, span))
        if working_bytes := self.working[stage][action != FORWARD]:
            self._work(rank, start, end, working_bytes)
        if action == FORWARD:
            self.boundaries[ACTIVATION, stage, microbatch, step] = end
            self._hold(start, rank, ACTIVATIONS, self.kept[stage])
        else:
            if action in _FROM_OUTPUT:
                self.boundaries[ACTIVATION_GRADIENT, stage, microbatch, step] = end
                if self.costs[stage].recomputes:
                    n_bytes = self.costs[stage].activation_bytes
                    self._hold(start, rank, ACTIVATIONS, n_bytes)
                    self._hold(end, rank, ACTIVATIONS, -n_bytes)
            if action != BACKWARD_INPUT:
                self._add_to_sum(rank, i, end)
        self.events.end(g, end)

    def _overlapped(
        self, g: int, rank: int, start: float, seconds: float
    ) -> tuple[float, float, float]:
        """Return start of an op, end of its span, and its end; a pair's ops end together.

        The spans of a pair follow one another, so that a rank is never busy twice.
        """
        factor = self.hardware.overlap_time
        if g in self.events.pairs:
            next_instruction = self.events.instruction(g + 1)
            pair_seconds = (
                seconds
                + self.seconds[next_instruction.stage][next_instruction.action] / self.speeds[rank]
            )
            end = start + factor * pair_seconds
            self.under_way[rank] = start + factor * seconds, end
            return start, start + factor * seconds, end
        if g - 1 in self.events.pairs:
            start, end = self.under_way[rank]
            return start, end, end
        return start, start + seconds, start + seconds

    def _update(self, g: int, rank: int, i: Instruction, ready: float) -> None:
        """Update a stage's weights. A rank updates stages in turn, in parallel to its compute."""
        seconds = self._moving(rank, self.moved_by_update[i.stage])

        def begin(start: float, end: float) -> None:
            self._drop_sum(rank, i, start, end)
            # The new version is a separate tensor: late readers still use the old one.
            self._hold(start, rank, WEIGHTS, self.costs[i.stage].parameter_bytes)
            step = i.step or 0
            self.step_ends[step] = max(self.step_ends.get(step, 0.0), end)
            if seconds > 0:
                self._record(i, start, end, (rank, UPDATE, 0.0, None))
            self.events.end(g, end)

        self.events.occupy(g, ready, (~rank,), seconds, begin)

    def _predict(self, g: int, rank: int, i: Instruction, ready: float) -> None:
        """Read two weight versions and write one, before the next op."""
        start = max(self.computed[rank], ready)
        end = start + self._moving(rank, 3 * self.costs[i.stage].parameter_bytes)
        self.computed[rank] = end
        self._hold(start, rank, WEIGHTS, self.costs[i.stage].parameter_bytes)
        if end > start:
            self._record(i, start, end, (rank, COMPUTE, 0.0, None))
        self.events.end(g, end)

    def _message(self, g: int, rank: int, i: Instruction, ready: float) -> None:
        """Take the ports of a message."""
        n_bytes, n_ranks, peer = self.moved[i.buffer][i.stage], len(self.machines), i.peers[0]
        own_machine, peer_machine = self.machines[rank], self.machines[peer]
        seconds = self.messages[own_machine == peer_machine][i.buffer][i.stage]
        if not seconds:  # needs no port
            self._send(g, rank, i, n_bytes, ready, ready)
            return
        # Ports within machines and, further on, between them; those that send come first.
        ports = (
            (rank, n_ranks + peer)
            if own_machine == peer_machine
            else (2 * n_ranks + own_machine, 3 * n_ranks + peer_machine)
        )
        begin = partial(self._send, g, rank, i, n_bytes)
        self.events.occupy(g, ready, ports, seconds, begin)

    def _meet(self, g: int, rank: int, i: Instruction, ready: float) -> None:
        """Take the ports of a collective."""
        n_bytes, n_ranks = self.moved[i.buffer][i.stage], len(self.machines)
        ports: Ports = (*i.peers, *(n_ranks + peer for peer in i.peers))
        if len(machines := {self.machines[peer] for peer in i.peers}) > 1:
            ports += (
                *(2 * n_ranks + machine for machine in machines),
                *(3 * n_ranks + machine for machine in machines),
            )
        seconds = self.hardware.collective(i.action, n_bytes, i.peers)
        begin = partial(self._collective, g, rank, i, n_bytes)
        self.events.occupy(g, ready, ports, seconds, begin)

    def _send(
        self, g: int, rank: int, i: Instruction, n_bytes: float, start: float, end: float
    ) -> None:
        _, _, stage, microbatch, step, _, buffer, (peer,) = i
        self._record(i, start, end, (rank, SEND, n_bytes, peer), (peer, RECEIVE, n_bytes, rank))
        if microbatch is not None:
            key = (buffer, stage, microbatch, step)
            produced_at, self.boundaries[key] = self.boundaries[key], end
            if buffer == ACTIVATION:
                next_cost = self.costs[stage + 1]
                self._work(rank, produced_at, end, next_cost.extra_input_bytes)
                self.inputs[peer, stage + 1, microbatch, step] = next_cost.input_bytes
                self._hold(end, peer, INPUTS, next_cost.input_bytes)
            else:
                self._work(rank, produced_at, end, n_bytes)
        elif buffer == Buffer.WEIGHTS:
            self._hold(end, peer, WEIGHTS, n_bytes)
        else:
            self._drop_sum(rank, i, start, end)
            self._add_to_sum(peer, i, end)
        self.events.end(g, end)

    def _collective(
        self, g: int, rank: int, i: Instruction, n_bytes: float, start: float, end: float
    ) -> None:
        for peer in i.peers:
            if units := float(traffic_of(i, peer).units):
                self._record(i, start, end, (peer, SEND, units * n_bytes, None))
            else:
                self._record(i, start, end, (peer, RECEIVE, n_bytes, None))
            if i.action == Action.BROADCAST and peer != rank:
                self._hold(end, peer, WEIGHTS, n_bytes)
            elif i.action == Action.REDUCE and peer != rank:
                self._drop_sum(peer, i, start, end)
        self.events.end(g, end)

    def _free(self, g: int, rank: int, i: Instruction, when: float) -> None:
        """Free a weight version, or the activations and inputs of a micro-batch."""
        if i.buffer != ACTIVATION:
            self._hold(when, rank, WEIGHTS, -self.costs[i.stage].parameter_bytes)
        else:
            self._hold(when, rank, ACTIVATIONS, -self.kept[i.stage])
            if input_bytes := self.inputs.pop((rank, i.stage, i.microbatch, i.step), 0.0):
                self._hold(when, rank, INPUTS, -input_bytes)
        self.events.end(g, when)

    def _moving(self, rank: int, n_bytes: float) -> float:
        """Return the seconds to move bytes between a rank and its memory."""
        return n_bytes / self.hardware.memory_bandwidth / self.hardware.speed(rank)

    def _record(self, i: Instruction, start: float, end: float, *ports: _Use) -> None:
        """Add a span for each rank and lane in ``ports``, with the bytes and their other end."""
        label, step, slot = i.label, i.of_step, i.tick // self.slot
        _, _, stage, microbatch, *_ = i
        for rank, lane, n_bytes, peer in ports:
            span = (rank, lane, start, end, label, stage, microbatch, step, n_bytes, peer, slot)
            self.spans.append(_new(Span, span))

    def _hold(self, when: float, rank: int, kind: str, n_bytes: float) -> None:
        """Hold bytes from ``when`` on; fewer if negative."""
        self.changes.append(_new(Change, (when, rank, kind, n_bytes)))

    def _work(self, rank: int, start: float, end: float, n_bytes: float) -> None:
        """Hold workspace from ``start`` to ``end``."""
        if n_bytes > 0 and end > start:
            self._hold(start, rank, WORKING, n_bytes)
            self._hold(end, rank, WORKING, -n_bytes)

    def _add_to_sum(self, rank: int, i: Instruction, when: float) -> None:
        """Note that a gradient becomes part of a sum on ``rank`` at ``when`` seconds."""
        self.parts[rank, i.stage, i.step].append(when)

    def _drop_sum(self, rank: int, i: Instruction, start: float, end: float) -> None:
        """Free the sum used from ``start`` to ``end``; parts after ``start`` begin another."""
        part_times, gradient_bytes = (
            self.parts.pop((rank, i.stage, i.step)),
            self.costs[i.stage].gradient_bytes,
        )
        self._hold(min(part_times), rank, GRADIENTS, gradient_bytes)
        self._hold(end, rank, GRADIENTS, -gradient_bytes)
        if later_times := [when for when in part_times if when > start]:
            self.parts[rank, i.stage, i.step] = later_times

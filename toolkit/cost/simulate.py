"""Predict when every instruction of a program runs, from stage costs and hardware.

Time: each rank has a compute lane, an optimizer and a full-duplex port that work in parallel. Ops
run in program order, each when the previous op has ended and its inputs have arrived. A weight
prediction runs before the op that reads it; a stage updates when its gradient is complete. A
message starts when its content is ready, both ports are free and both ranks are within the
schedule's lookahead; a message that is not ready does not block later ones. A collective takes both
ports of all its ranks, in program order. Only a rank that begins with stage 0 waits for a clock, so
that workers keep their stagger.

Memory: weights, activations, gradients, optimizer state if given, stage inputs from arrival to
backward, and workspace of running ops and of values between stages. What BACKWARD_INPUT leaves for
BACKWARD_WEIGHT is not counted. A recomputing stage holds its activations during its backward (its
first half, if split), which takes longer by one forward.

Cost: one event per instruction, in replay order: linear in the number of instructions.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from toolkit.cost.hardware import Hardware, Port, check_hardware, reserve
from toolkit.cost.stage_costs import Costs
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
from toolkit.schedule import Action, Buffer, Instruction, Program, Schedule
from toolkit.schedule.instruction import collector_paused
from toolkit.schedule.program import traffic_of
from toolkit.schedule.replay import replay
from toolkit.schedule.steady_state import steady_steps


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
    simulation = _Simulation(program, costs, hardware, optimizer_bytes)
    handlers = simulation.handlers
    changes = [*program.changes[::-1]]
    with collector_paused():
        for rank, instruction in replay(program.ranks):
            if changes and instruction.tick >= changes[-1]:
                simulation.drain(changes.pop())
            handlers[instruction.action](rank, instruction)
    return simulation.timeline()


_FROM_OUTPUT = (Action.BACKWARD, Action.BACKWARD_INPUT)  # start from the output's gradient


def _check(
    program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
) -> None:
    if not isinstance(program, Program):
        raise UserError(
            f"simulate takes a Program: got a {type(program).__name__}; lower the schedule with"
            " schedule.lower(n_steps).verify()"
        )
    check_hardware(hardware)
    n, n_ranks = program.schedule.n_stages, len(program.ranks)
    for name, given, wanted, what in (
        ("costs", costs, n, "stages"),
        ("optimizer_bytes", optimizer_bytes or costs, n, "stages"),
        ("hardware.speeds", hardware.speeds[:n_ranks] or program.ranks, n_ranks, "ranks"),
        ("hardware.memories", hardware.memories[:n_ranks] or program.ranks, n_ranks, "ranks"),
    ):
        if len(given) != wanted:
            raise UserError(f"{name} needs an entry for each of {wanted} {what}: got {len(given)}")


class _Simulation:
    """Clocks of all ranks, and when and where each buffer is ready."""

    def __init__(
        self, program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
    ) -> None:
        schedule, n_ranks = program.schedule, len(program.ranks)
        self.program, self.costs, self.hardware = program, costs, hardware
        self.handlers = {
            action: self._collective if action.communicates else self._compute for action in Action
        } | {
            Action.UPDATE: self._update,
            Action.PREDICT: self._predict,
            Action.SEND: self._send,
            Action.RECV: self._receive,
            Action.FREE: self._free,
        }
        self.names: dict[tuple, str] = {op: str(op) for op in schedule.timing.starts}
        self.spans: list[Span] = []
        self.changes: list[Change] = []
        self.step_ends: dict[int, float] = {}
        # Of each stage
        self.seconds = [self._seconds(stage) for stage in range(len(costs))]
        self.working = [cost.working_bytes for cost in costs]
        states: Sequence[float | None] = optimizer_bytes or [None] * len(costs)
        self.moved_by_update = [c.update_bytes(s) for c, s in zip(costs, states, strict=True)]
        # Of each rank: when its lanes are free, when its ops end, when its last collective began
        self.since = program.first_step  # the first step of the schedule that runs
        self.computed = self._starts(schedule.at(program.first_step), 0)
        self.updated = [0.0] * n_ranks
        self.sending = [Port() for _ in range(n_ranks)]
        self.receiving = [Port() for _ in range(n_ranks)]
        self.ops: list[tuple[list[int], list[float]]] = [([], []) for _ in range(n_ranks)]
        self.met = [0.0] * n_ranks
        self.ahead = schedule.lookahead
        # When buffers are ready; a key without a rank has one holder at a time
        self.boundaries: dict[tuple, float] = {}
        self.weights: dict[tuple, float] = {}
        self.sums: dict[tuple, float] = {}
        self.begun: dict[tuple, float] = {}  # first contribution of each sum
        self.in_use_until: dict[tuple, float] = {}  # weights and activations
        self.inputs: dict[tuple, float] = {}  # bytes of the inputs that stages keep
        self.arrival = 0.0  # end of the last message: replay receives it next
        for rank in range(n_ranks if optimizer_bytes else 0):
            for stage in program.updated(rank):
                self._hold(0.0, rank, OPTIMIZER, optimizer_bytes[stage])
        for stage in range(schedule.n_stages):
            for rank in schedule.first_holders(stage, program.first_step):
                for version in schedule.versions(stage, program.first_step):
                    self._hold_weights(0.0, rank, stage, version)

    def timeline(self) -> Timeline:
        ends = tuple(self.step_ends[step] for step in sorted(self.step_ends))
        schedule, n_ranks = self.program.schedule, len(self.program.ranks)
        steady = steady_steps(schedule, len(ends), self.program.first_step)
        return Timeline(schedule.name, n_ranks, self.spans, self.changes, ends, steady)

    def _seconds(self, stage: int) -> list[float]:
        """Seconds of each kind of op."""
        forward, backward = self.costs[stage].seconds(self.hardware)
        if self.costs[stage].recomputes:
            return [forward, forward + backward, forward + backward, 0.0]
        return [forward, backward, backward / 2, backward / 2]

    def _starts(self, schedule: Schedule, tick: int) -> list[float]:
        """Earliest start of each rank from ``tick`` on: as in ``schedule`` if it has stage 0."""
        timing = schedule.timing
        busy = [0.0] * len(self.program.ranks)  # seconds of compute in a training step
        for op in timing.starts:
            rank = schedule.rank(op.stage, op.microbatch)
            busy[rank] += self.seconds[op.stage][op.kind] / self.hardware.speed(rank)
        starts = [0.0] * len(busy)
        for rank, start in self.program.first_forwards(tick).items():
            starts[rank] = start / timing.period * max(busy)
        return starts

    def drain(self, tick: int) -> None:
        """Let every rank finish, before the next schedule begins at ``tick``."""
        step = self.program.schedule.next_change(self.since)
        assert step is not None
        self.since, end = step, max(span.end for span in self.spans)
        starts = self._starts(self.program.schedule.at(step), tick)
        self.computed = [end + start for start in starts]

    def _compute(self, rank: int, i: Instruction) -> None:
        stage, action, cost = i.stage, i.action, self.costs[i.stage]
        key = (stage, i.microbatch, i.step)
        reads = [(rank, *weights) for weights in i.reads]
        start = max(self.computed[rank], *(self.weights[key] for key in reads))
        if action == Action.FORWARD and stage > 0:
            made = self.boundaries.pop((Buffer.ACTIVATION, stage - 1, i.microbatch, i.step))
            start = max(start, made)
            if (rank, *key) not in self.inputs:  # produced on this rank
                self.inputs[rank, *key] = cost.extra_input_bytes
                self._hold(made, rank, INPUTS, cost.extra_input_bytes)
        elif action in _FROM_OUTPUT and stage < len(self.costs) - 1:
            after = (Buffer.ACTIVATION_GRADIENT, stage + 1, i.microbatch, i.step)
            arrived = self.boundaries.pop(after)
            start = max(start, arrived)
            self._work(rank, arrived, start, self.costs[stage + 1].input_gradient_bytes)
        end = start + self.seconds[stage][action] / self.hardware.speed(rank)
        self.computed[rank] = end
        for weights in reads:
            self._use(weights, end)
        ticks, ends = self.ops[rank]
        ticks.append(i.tick)
        ends.append(end)
        self._record(i, rank, COMPUTE, start, end)
        self._work(rank, start, end, self.working[stage][action != Action.FORWARD])
        if action == Action.FORWARD:
            self.boundaries[Buffer.ACTIVATION, *key] = end
            self._hold(start, rank, ACTIVATIONS, cost.kept_bytes)
            return
        self._use((rank, Buffer.ACTIVATION, *key), end)
        if action in _FROM_OUTPUT:
            self.boundaries[Buffer.ACTIVATION_GRADIENT, *key] = end
            if cost.recomputes:
                self._hold(start, rank, ACTIVATIONS, cost.activation_bytes)
                self._hold(end, rank, ACTIVATIONS, -cost.activation_bytes)
        if action != Action.BACKWARD_INPUT:
            self._add_to_sum(rank, stage, i.step, end)

    def _update(self, rank: int, i: Instruction) -> None:
        key = (rank, i.stage, i.step)
        start = max(self.updated[rank], self.weights[key], self.sums[key])
        end = start + self._moving(rank, self.moved_by_update[i.stage])
        self.updated[rank] = end
        self._drop_sum(rank, i, end)
        # The new version is a separate tensor: late readers still use the old one.
        self._hold_weights(start, rank, i.stage, i.version, ready=end)
        self._use(key, end)
        step = i.step or 0
        self.step_ends[step] = max(self.step_ends.get(step, 0.0), end)
        if end > start:
            self._record(i, rank, UPDATE, start, end)

    def _predict(self, rank: int, i: Instruction) -> None:
        """Read two weight versions and write one, before the next op."""
        ready = (self.weights[rank, *weights] for weights in i.reads)
        start = max(self.computed[rank], *ready)
        end = start + self._moving(rank, 3 * self.costs[i.stage].parameter_bytes)
        self.computed[rank] = end
        for weights in i.reads:
            self._use((rank, *weights), end)
        self._hold_weights(start, rank, i.stage, i.version, i.step)
        if end > start:
            self._record(i, rank, COMPUTE, start, end)

    def _send(self, rank: int, i: Instruction) -> None:
        peer = i.peers[0]
        made, n_bytes = self._content(rank, i)
        ready = max(made, self._open(i, (rank, peer)))
        seconds = self.hardware.message(n_bytes)
        start = reserve([self.sending[rank], self.receiving[peer]], ready, seconds)
        self.arrival = end = start + seconds
        self._record(i, rank, SEND, start, end, n_bytes, peer)
        self._record(i, peer, RECEIVE, start, end, n_bytes, rank)
        if i.buffer == Buffer.GRADIENT:
            self._drop_sum(rank, i, end)
        elif i.buffer == Buffer.WEIGHTS:
            self._use((rank, i.stage, i.version), end)
        elif i.buffer == Buffer.ACTIVATION_GRADIENT:
            self._work(rank, made, end, n_bytes)
        else:
            self._work(rank, made, end, self.costs[i.stage + 1].extra_input_bytes)

    def _receive(self, rank: int, i: Instruction) -> None:
        if i.buffer == Buffer.WEIGHTS:
            self._hold_weights(self.arrival, rank, i.stage, i.version)
        elif i.buffer == Buffer.GRADIENT:
            self._add_to_sum(rank, i.stage, i.step, self.arrival)
        else:
            self.boundaries[i.buffer, i.stage, i.microbatch, i.step] = self.arrival
            if i.buffer == Buffer.ACTIVATION:
                n_bytes = self.costs[i.stage + 1].input_bytes
                self.inputs[rank, i.stage + 1, i.microbatch, i.step] = n_bytes
                self._hold(self.arrival, rank, INPUTS, n_bytes)

    def _collective(self, rank: int, i: Instruction) -> None:
        if rank != i.peers[0]:
            return  # the root's instruction stands for all
        n_bytes = self._content(rank, i)[1]
        holders = i.peers[:1] if i.action == Action.BROADCAST else i.peers
        ready = max(self._content(peer, i)[0] for peer in holders)
        ready = max(ready, self._open(i, i.peers), *(self.met[peer] for peer in i.peers))
        seconds = self.hardware.collective(i.action, n_bytes, len(i.peers))
        ports = [port[peer] for port in (self.sending, self.receiving) for peer in i.peers]
        start = reserve(ports, ready, seconds)
        end = start + seconds
        for peer in i.peers:
            self.met[peer] = start
            if units := float(traffic_of(i, peer).units):
                self._record(i, peer, SEND, start, end, units * n_bytes, None)
            else:
                self._record(i, peer, RECEIVE, start, end, n_bytes, None)
            if i.action == Action.BROADCAST:
                if peer == rank:
                    self._use((rank, i.stage, i.version), end)
                else:
                    self._hold_weights(end, peer, i.stage, i.version)
            elif i.action == Action.REDUCE and peer != rank:
                self._drop_sum(peer, i, end)
            else:
                self.sums[peer, i.stage, i.step] = end

    def _free(self, rank: int, i: Instruction) -> None:
        cost = self.costs[i.stage]
        if i.buffer != Buffer.ACTIVATION:
            key = (rank, *i.weights)
            when = max(self.weights.pop(key), self.in_use_until.pop(key, 0.0))
            self._hold(when, rank, WEIGHTS, -cost.parameter_bytes)
            return
        when = self.in_use_until.pop((rank, Buffer.ACTIVATION, i.stage, i.microbatch, i.step))
        self._hold(when, rank, ACTIVATIONS, -cost.kept_bytes)
        if inputs := self.inputs.pop((rank, i.stage, i.microbatch, i.step), 0.0):
            self._hold(when, rank, INPUTS, -inputs)

    def _content(self, rank: int, i: Instruction) -> tuple[float, float]:
        """Return when a message's content is ready, and its bytes."""
        cost = self.costs[i.stage]
        if i.buffer == Buffer.WEIGHTS:
            return self.weights[rank, i.stage, i.version], cost.parameter_bytes
        if i.buffer == Buffer.GRADIENT:
            return self.sums[rank, i.stage, i.step], cost.gradient_bytes
        ready = self.boundaries[i.buffer, i.stage, i.microbatch, i.step]
        sends = cost.output_bytes if i.buffer == Buffer.ACTIVATION else cost.input_gradient_bytes
        return ready, sends

    def _open(self, i: Instruction, ranks: Iterable[int]) -> float:
        """Return when ``ranks`` are within the lookahead of a message."""
        opened = 0.0
        for rank in ranks:
            ticks, ends = self.ops[rank]
            if before := bisect_left(ticks, i.tick - self.ahead):
                opened = max(opened, ends[before - 1])
        return opened

    def _moving(self, rank: int, n_bytes: float) -> float:
        """Seconds to move bytes between a rank and its memory."""
        return n_bytes / self.hardware.memory_bandwidth / self.hardware.speed(rank)

    def _record(
        self, i: Instruction, rank: int, lane: str, start: float, end: float, *sent: Any
    ) -> None:
        """Add a span; ``sent``: its bytes and peer."""
        n_bytes, peer = sent or (0.0, None)
        name, slot = self.names.get(i[1:4]) or i.label, self.program.slot(i)
        what = (name, i.stage, i.microbatch, i.of_step, n_bytes, peer, slot)
        self.spans.append(Span(rank, lane, start, end, *what))

    def _use(self, key: tuple, until: float) -> None:
        """Extend the use of weights or activations to ``until``."""
        self.in_use_until[key] = max(self.in_use_until.get(key, 0.0), until)

    def _hold(self, when: float, rank: int, kind: str, n_bytes: float) -> None:
        """Hold bytes from ``when`` on; fewer if negative."""
        self.changes.append(Change(when, rank, kind, n_bytes))

    def _work(self, rank: int, start: float, end: float, n_bytes: float) -> None:
        """Hold workspace from ``start`` to ``end``."""
        if n_bytes > 0 and end > start:
            self._hold(start, rank, WORKING, n_bytes)
            self._hold(end, rank, WORKING, -n_bytes)

    def _hold_weights(
        self, when: float, rank: int, stage: int, *which: int | None, ready: float | None = None
    ) -> None:
        """Hold weights from ``when`` on; they can be read from ``ready`` on."""
        self.weights[rank, stage, *which] = when if ready is None else ready
        self._hold(when, rank, WEIGHTS, self.costs[stage].parameter_bytes)

    def _add_to_sum(self, rank: int, stage: int, step: int | None, when: float) -> None:
        key = (rank, stage, step)
        self.begun[key] = min(self.begun.get(key, when), when)
        self.sums[key] = max(self.sums.get(key, 0.0), when)

    def _drop_sum(self, rank: int, i: Instruction, when: float) -> None:
        """Free the rank's gradient sum at ``when``, or when it is ready if that is later."""
        key = (rank, i.stage, i.step)
        ready, held = self.sums.pop(key), self.costs[i.stage].gradient_bytes
        self._hold(self.begun.pop(key, ready), rank, GRADIENTS, held)
        self._hold(max(when, ready), rank, GRADIENTS, -held)

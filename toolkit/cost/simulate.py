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
from toolkit.schedule import Action, Buffer, Instruction, Program
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
    with collector_paused():
        for rank, instruction in replay(program.ranks):
            handlers[instruction.action](rank, instruction)
    return simulation.timeline()


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
    if len(costs) != n:
        raise UserError(f"costs need one entry for each of the {n} stages: got {len(costs)}")
    if (given := len(optimizer_bytes)) not in (0, n):
        raise UserError(f"optimizer_bytes has an entry for each of {n} stages or none: got {given}")
    for name in ("speeds", "memories"):
        if 0 < (given := len(getattr(hardware, name))) < n_ranks:
            raise UserError(
                f"hardware.{name} has an entry for each of {n_ranks} ranks, or none: got {given}"
            )


class _Simulation:
    """Clocks of all ranks, and when and where each buffer is ready."""

    def __init__(
        self, program: Program, costs: Costs, hardware: Hardware, optimizer_bytes: Sequence[float]
    ) -> None:
        self.program, self.costs, self.hardware = program, costs, hardware
        states: Sequence[float | None] = optimizer_bytes or [None] * len(costs)
        updates = zip(costs, states, strict=True)
        self.moved = [cost.update_bytes(state) for cost, state in updates]  # bytes per update
        self.working = [cost.working_bytes for cost in costs]
        n_ranks = len(program.ranks)
        self.computed = [0.0] * n_ranks  # time at which the compute lane is free
        self.ops: list[tuple[list[int], list[float]]] = [([], []) for _ in range(n_ranks)]
        self.ahead = program.schedule.lookahead
        self.updated = [0.0] * n_ranks  # time at which the optimizer is free
        self.sending = [Port() for _ in range(n_ranks)]
        self.receiving = [Port() for _ in range(n_ranks)]
        self.met = [0.0] * n_ranks  # start of the last collective
        self.seconds = [self._seconds(stage) for stage in range(len(costs))]
        self._stagger()
        self.boundaries: dict[tuple, float] = {}
        self.inputs: dict[tuple, float] = {}  # bytes of the inputs that stages keep
        self.weights: dict[tuple, float] = {}
        self.sums: dict[tuple, float] = {}
        self.begun: dict[tuple, float] = {}  # first contribution of each sum
        self.in_use_until: dict[tuple, float] = {}  # weights and activations
        self.arrival = 0.0
        self.spans: list[Span] = []
        self.changes: list[Change] = []
        self.steps: dict[int, float] = {}
        for rank in range(n_ranks if optimizer_bytes else 0):
            for stage in program.updated(rank):
                self.changes.append(Change(0.0, rank, OPTIMIZER, optimizer_bytes[stage]))
        self.names: dict[tuple, str] = {op: str(op) for op in program.schedule.timing.starts}
        self.handlers = {
            action: self._collective if action.communicates else self._compute for action in Action
        } | {
            Action.UPDATE: self._update,
            Action.PREDICT: self._predict,
            Action.SEND: self._send,
            Action.RECV: self._receive,
            Action.FREE: self._free,
        }
        schedule = program.schedule
        for j in range(schedule.n_stages):
            for rank in schedule.first_holders(j):
                for version in schedule.versions(j, program.first_step):
                    self._hold_weights(0.0, rank, j, version)

    def timeline(self) -> Timeline:
        ends = tuple(self.steps[step] for step in sorted(self.steps))
        schedule, n_ranks = self.program.schedule, len(self.program.ranks)
        steady = steady_steps(schedule, len(ends))
        return Timeline(schedule.name, n_ranks, self.spans, self.changes, ends, steady)

    def _stagger(self) -> None:
        """Delay each rank that begins with stage 0 to its start in the schedule."""
        timing = self.program.schedule.timing
        busy = [0.0] * len(self.program.ranks)  # seconds of compute in a training step
        for op in timing.starts:
            rank = self.program.schedule.rank(op.stage, op.microbatch)
            busy[rank] += self.seconds[op.stage][op.kind] / self.hardware.speed(rank)
        for rank, tick in self.program.first_forwards().items():
            self.computed[rank] = tick / timing.period * max(busy)

    def _seconds(self, stage: int) -> list[float]:
        """Seconds of each kind of op."""
        forward, backward = self.costs[stage].seconds(self.hardware)
        if self.costs[stage].recomputes:
            return [forward, forward + backward, forward + backward, 0.0]
        return [forward, backward, backward / 2, backward / 2]

    def _compute(self, rank: int, i: Instruction) -> None:
        stage, action = i.stage, i.action
        start = max(self.computed[rank], self.weights[rank, *i.weights])
        key = (stage, i.microbatch, i.step)
        if action == Action.FORWARD:
            if stage > 0:
                before = (Buffer.ACTIVATION, stage - 1, i.microbatch, i.step)
                made = self.boundaries.pop(before)
                start = max(start, made)
                if (rank, *key) not in self.inputs:  # produced on this rank
                    self._hold_inputs(made, (rank, *key), self.costs[stage].extra_input_bytes)
        elif action != Action.BACKWARD_WEIGHT and stage < len(self.costs) - 1:
            after = (Buffer.ACTIVATION_GRADIENT, stage + 1, i.microbatch, i.step)
            arrived = self.boundaries.pop(after)
            start = max(start, arrived)
            self._work(rank, arrived, start, self.costs[stage + 1].input_gradient_bytes)
        end = start + self.seconds[stage][action] / self.hardware.speed(rank)
        self.computed[rank] = end
        self._use((rank, *i.weights), end)
        ticks, ends = self.ops[rank]
        ticks.append(i.tick)
        ends.append(end)
        in_forward, in_backward = self.working[stage]
        name, slot = self.names[i[1:4]], self.program.slot(i)
        self.spans.append(Span(rank, COMPUTE, start, end, name, *key, slot=slot))
        if action == Action.FORWARD:
            self.boundaries[Buffer.ACTIVATION, *key] = end
            held = self.costs[stage].kept_bytes
            self.changes.append(Change(start, rank, ACTIVATIONS, held))
            self._work(rank, start, end, in_forward)
            return
        self._use((rank, Buffer.ACTIVATION, *key), end)
        if self.costs[stage].recomputes and action != Action.BACKWARD_WEIGHT:
            again = self.costs[stage].activation_bytes
            self.changes.append(Change(start, rank, ACTIVATIONS, again))
            self.changes.append(Change(end, rank, ACTIVATIONS, -again))
        self._work(rank, start, end, in_backward)
        if action != Action.BACKWARD_WEIGHT:
            self.boundaries[Buffer.ACTIVATION_GRADIENT, *key] = end
        if action != Action.BACKWARD_INPUT:
            self._add_to_sum(rank, stage, i.step, end)

    def _work(self, rank: int, start: float, end: float, n_bytes: float) -> None:
        """Hold workspace from ``start`` to ``end``."""
        if n_bytes > 0 and end > start:
            self.changes.append(Change(start, rank, WORKING, n_bytes))
            self.changes.append(Change(end, rank, WORKING, -n_bytes))

    def _hold_inputs(self, when: float, key: tuple, n_bytes: float) -> None:
        """Hold the inputs of ``key`` = (rank, stage, microbatch, step)."""
        self.inputs[key] = n_bytes
        self.changes.append(Change(when, key[0], INPUTS, n_bytes))

    def _add_to_sum(self, rank: int, stage: int, step: int | None, when: float) -> None:
        key = (rank, stage, step)
        self.begun[key] = min(self.begun.get(key, when), when)
        self.sums[key] = max(self.sums.get(key, 0.0), when)

    def _drop_sum(self, rank: int, i: Instruction, when: float) -> None:
        """Free the rank's gradient sum at ``when``, or when it is ready if that is later."""
        key = (rank, i.stage, i.step)
        ready, held = self.sums.pop(key), self.costs[i.stage].gradient_bytes
        self.changes.append(Change(self.begun.pop(key, ready), rank, GRADIENTS, held))
        self.changes.append(Change(max(when, ready), rank, GRADIENTS, -held))

    def _update(self, rank: int, i: Instruction) -> None:
        step = i.step or 0
        key = (rank, i.stage, i.step)
        start = max(self.updated[rank], self.weights[key], self.sums[key])
        seconds = self.moved[i.stage] / self.hardware.memory_bandwidth / self.hardware.speed(rank)
        self.updated[rank] = end = start + seconds
        self._drop_sum(rank, i, end)
        # The new version is a separate tensor: late readers still use the old one.
        self._hold_weights(start, rank, i.stage, i.version, ready=end)
        self._use(key, end)
        self.steps[step] = max(self.steps.get(step, 0.0), end)
        if seconds > 0:
            what = (i.label, i.stage, None, i.step)
            self.spans.append(Span(rank, UPDATE, start, end, *what, slot=self.program.slot(i)))

    def _predict(self, rank: int, i: Instruction) -> None:
        """Read two weight versions and write one, before the next op."""
        ready = (self.weights[rank, *weights] for weights in i.predicted_from)
        start = max(self.computed[rank], *ready)
        moved = 3 * self.costs[i.stage].parameter_bytes
        end = start + moved / self.hardware.memory_bandwidth / self.hardware.speed(rank)
        self.computed[rank] = end
        for weights in i.predicted_from:
            self._use((rank, *weights), end)
        self._hold_weights(start, rank, i.stage, i.version, i.step)
        if end > start:
            what = (i.label, i.stage, None, i.step)
            self.spans.append(Span(rank, COMPUTE, start, end, *what, slot=self.program.slot(i)))

    def _hold_weights(
        self, when: float, rank: int, stage: int, *which: int | None, ready: float | None = None
    ) -> None:
        """Hold weights from ``when`` on; they can be read from ``ready`` on."""
        self.weights[rank, stage, *which] = when if ready is None else ready
        held = self.costs[stage].parameter_bytes
        self.changes.append(Change(when, rank, WEIGHTS, held))

    def _use(self, key: tuple, until: float) -> None:
        """Extend the use of weights or activations to ``until``."""
        self.in_use_until[key] = max(self.in_use_until.get(key, 0.0), until)

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

    def _send(self, rank: int, i: Instruction) -> None:
        peer = i.peers[0]
        made, n_bytes = self._content(rank, i)
        ready = max(made, self._open(i, (rank, peer)))
        seconds = self.hardware.message(n_bytes)
        ports = [self.sending[rank], self.receiving[peer]]
        start = reserve(ports, ready, seconds)
        self.arrival = end = start + seconds
        what = (i.label, i.stage, i.microbatch, i.of_step, n_bytes)
        slot = self.program.slot(i)
        self.spans.append(Span(rank, SEND, start, end, *what, peer, slot))
        self.spans.append(Span(peer, RECEIVE, start, end, *what, rank, slot))
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
                key = (rank, i.stage + 1, i.microbatch, i.step)
                self._hold_inputs(self.arrival, key, self.costs[i.stage + 1].input_bytes)

    def _collective(self, rank: int, i: Instruction) -> None:
        if rank != i.peers[0]:
            return
        n_ranks, n_bytes = len(i.peers), self._content(i.peers[0], i)[1]
        holders = i.peers[:1] if i.action == Action.BROADCAST else i.peers
        ready = max(self._content(peer, i)[0] for peer in holders)
        ready = max(ready, self._open(i, i.peers), *(self.met[peer] for peer in i.peers))
        ring = i.action == Action.ALL_REDUCE
        cost = self.hardware.all_reduce if ring else self.hardware.tree
        seconds = cost(n_bytes, n_ranks)
        ports = [port[peer] for port in (self.sending, self.receiving) for peer in i.peers]
        start = reserve(ports, ready, seconds)
        end = start + seconds
        name = i.label
        for peer in i.peers:
            self.met[peer] = start
            units = float(traffic_of(i, peer).units)
            lane, through = (SEND, units * n_bytes) if units else (RECEIVE, n_bytes)
            what = (i.stage, None, i.of_step, through, None, self.program.slot(i))
            self.spans.append(Span(peer, lane, start, end, name, *what))
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
        if i.buffer != Buffer.ACTIVATION:
            key = (rank, *i.weights)
            when = max(self.weights.pop(key), self.in_use_until.pop(key, 0.0))
            self.changes.append(Change(when, rank, WEIGHTS, -self.costs[i.stage].parameter_bytes))
        else:
            held = self.costs[i.stage].kept_bytes
            key = (rank, Buffer.ACTIVATION, i.stage, i.microbatch, i.step)
            when = self.in_use_until.pop(key)
            self.changes.append(Change(when, rank, ACTIVATIONS, -held))
            if inputs := self.inputs.pop((rank, i.stage, i.microbatch, i.step), 0.0):
                self.changes.append(Change(when, rank, INPUTS, -inputs))

"""When the instructions of one program run on one machine, and what its ranks hold meanwhile.

The rules of time and memory are in :mod:`toolkit.cost.simulate`.
"""

from collections.abc import Sequence
from functools import partial
from math import inf

from toolkit.cost.event_queue import EventQueue
from toolkit.cost.hardware import Hardware
from toolkit.cost.machine_ports import MachinePorts
from toolkit.cost.memory_changes import MemoryChanges
from toolkit.cost.program_links import ProgramLinks
from toolkit.cost.rank_starts import rank_starts
from toolkit.cost.stage_costs import Costs, moved_bytes
from toolkit.cost.timeline import COMPUTE, RECEIVE, SEND, UPDATE, Span, Timeline
from toolkit.schedule import Action, Buffer, Instruction, Kind
from toolkit.schedule.instruction import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    LETTERS,
)
from toolkit.schedule.steady_state import steady_steps
from toolkit.schedule.traffic import traffic_of

_new = tuple.__new__  # of many named tuples: their own constructors take twice as long
_MicrobatchKey = tuple[int, int | None, int | None]  # stage, micro-batch, step


class Simulation:
    """Spans of instructions, and changes of the memory that ranks hold.

    An instruction has a number in the event queue. Its method here gets the time at which what it
    needs is there; once its end is known, ``events.end`` makes its users ready.
    """

    def __init__(
        self,
        links: ProgramLinks,
        costs: Costs,
        hardware: Hardware,
        optimizer_bytes: Sequence[float],
    ) -> None:
        program = links.program
        schedule = program.schedule
        n_ranks = len(program.ranks)
        self.program = program
        self.costs = costs
        self.hardware = hardware
        self.links = links
        self.events = EventQueue(links, shared=hardware.shared_ports)
        self.memory = MemoryChanges(program, costs, optimizer_bytes)
        self.spans: list[Span] = []
        self.step_ends: dict[int, float] = {}
        self.slot = schedule.timing.ticks_per_slot

        # What is looked up for each instruction.
        self.has_pairs = bool(links.pairs)
        accumulate = schedule.accumulate
        self.op_seconds = [cost.op_seconds(hardware, accumulate) for cost in costs]
        self.speeds = [hardware.speed(rank) for rank in range(n_ranks)]
        self.ports = MachinePorts(hardware, n_ranks)
        self.working_bytes = [cost.working_bytes for cost in costs]
        self.message_bytes = moved_bytes(costs)
        self.input_gradient_bytes = [cost.input_gradient_bytes for cost in costs]
        self.last_stage = schedule.n_stages - 1
        self.message_seconds = {
            is_local: self._seconds_of_messages(is_local) for is_local in (False, True)
        }
        states: Sequence[float | None] = optimizer_bytes or [None] * len(costs)
        self.update_bytes = [
            cost.update_bytes(state_bytes)
            for cost, state_bytes in zip(costs, states, strict=True)
        ]

        # What changes as instructions run.
        # The first step of the schedule that runs.
        self.schedule_step = program.first_step
        # End of a rank's last op.
        self.free_at = self._starts(program.first_step, 0)
        # When outputs of stages and gradients of their inputs are there.
        self.outputs: dict[_MicrobatchKey, float] = {}
        self.input_gradients: dict[_MicrobatchKey, float] = {}
        # By rank: span of its backward.
        self.pair_under_way: dict[int, tuple[float, float]] = {}

    def _seconds_of_messages(self, is_local: bool) -> dict[Buffer | None, list[float]]:
        """Return the seconds of a message, ``[stage]``, by what it moves."""
        message = partial(self.hardware.message, local=is_local)
        return {
            buffer: [*map(message, n_bytes)]
            for buffer, n_bytes in self.message_bytes.items()
        }

    def run(self) -> None:
        """Run all instructions, from each change of the schedule to the next."""
        # Every action that is not named here is a collective.
        begin = dict.fromkeys(Action, self._meet) | {
            **dict.fromkeys(map(Action, Kind), self._backward),
            Action.FORWARD: self._forward,
            Action.SEND: self._message,
            Action.UPDATE: self._update,
            Action.PREDICT: self._predict,
            Action.FREE: self._free,
        }
        start = 0.0
        for change in self.program.changes:
            self.events.run(begin, change, start)
            start = self._drain(change)
        self.events.run(begin, inf, start)

    def timeline(self) -> Timeline:
        """Return the timeline of all instructions that have run."""
        schedule = self.program.schedule
        ends = tuple(self.step_ends[step] for step in sorted(self.step_ends))
        steady_range = steady_steps(schedule, len(ends), self.program.first_step)
        n_ranks = len(self.program.ranks)
        return Timeline(
            schedule.name, n_ranks, self.spans, self.memory.changes, ends, steady_range
        )

    def _drain(self, tick: int) -> float:
        """Return when every rank has finished, before the next schedule begins at ``tick``."""
        step = self.program.schedule.next_change(self.schedule_step)
        assert step is not None
        self.schedule_step = step
        end = max(span.end for span in self.spans)
        self.free_at = [end + start for start in self._starts(step, tick)]
        return end

    def _starts(self, step: int, tick: int) -> list[float]:
        """Return the earliest start of each rank by the schedule of ``step``, from ``tick`` on."""
        schedule = self.program.schedule.at(step)
        return rank_starts(self.program, schedule, tick, self.op_seconds, self.speeds)

    def _forward(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Run a forward, take its input and keep its activations."""
        _, start, end = self._run_op(number, rank, instruction, ready)
        _, _, stage, microbatch, step, _, _, _ = instruction
        memory = self.memory
        # What crosses a boundary is popped: it is used once, so memory stays bounded.
        if stage > 0:
            produced_at = self.outputs.pop((stage - 1, microbatch, step))
            memory.take_input(produced_at, (rank, stage, microbatch, step))
        working_bytes, _ = self.working_bytes[stage]
        if working_bytes:
            memory.work(rank, start, end, working_bytes)
        self.outputs[stage, microbatch, step] = end
        memory.hold_activations(start, rank, stage)
        self.events.end(number, end)

    def _backward(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Run a backward or half of one, take its gradient and add to the sum of the stage's."""
        takes_at, start, end = self._run_op(number, rank, instruction, ready)
        _, action, stage, microbatch, step, _, _, _ = instruction
        memory = self.memory
        starts_from_output = action != BACKWARD_WEIGHT
        if starts_from_output and stage < self.last_stage:
            arrived_at = self.input_gradients.pop((stage + 1, microbatch, step))
            gradient_bytes = self.input_gradient_bytes[stage + 1]
            # The gradient waits in memory from its arrival until the backward takes it.
            memory.work(rank, arrived_at, takes_at, gradient_bytes)
        _, working_bytes = self.working_bytes[stage]
        if working_bytes:
            memory.work(rank, start, end, working_bytes)
        if starts_from_output:
            self.input_gradients[stage, microbatch, step] = end
            memory.recompute(start, end, rank, stage)
        # The first half of a split backward has no gradients of weights yet.
        if action != BACKWARD_INPUT:
            memory.add_to_sum(end, rank, stage, step)
        self.events.end(number, end)

    def _run_op(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> tuple[float, float, float]:
        """Run an op once the rank is free and its inputs have arrived at ``ready`` seconds.

        Returns:
            When it takes its inputs, its start and its end.
        """
        tick, action, stage, microbatch, step, _, _, _ = instruction
        # An op starts at the later of two times::
        #
        #     ops of the rank  ... | op before |          free_at: the end of the op before
        #     messages                 -------------->    ready: its inputs are there
        #     ops of the rank                         | this op |
        start = self.free_at[rank]
        if ready > start:
            start = ready
        takes_at = start
        seconds = self.op_seconds[stage][action] / self.speeds[rank]
        span_end = end = start + seconds
        if self.has_pairs:
            start, span_end, end = self._overlapped(number, rank, start, seconds)
        self.free_at[rank] = end
        name = f"{stage}{LETTERS[action]}{microbatch}"
        slot = tick // self.slot
        # Made as a plain tuple: this is the innermost loop of the simulator.
        content = (name, stage, microbatch, step, 0.0, None, slot)
        self.spans.append(_new(Span, (rank, COMPUTE, start, span_end, *content)))
        return takes_at, start, end

    def _overlapped(
        self, number: int, rank: int, start: float, seconds: float
    ) -> tuple[float, float, float]:
        """Return start of an op, end of its span, and its end; a pair's ops end together.

        The spans of a pair follow one another, so that a rank is never busy twice::

            spans of a pair   | forward | backward |
            ends of both ops                       |      results of both are there
        """
        factor = self.hardware.overlap_time
        if number in self.links.pairs:
            # The backward of a pair comes right after its forward.
            backward = self.links.instructions[number + 1]
            backward_seconds = (
                self.op_seconds[backward.stage][backward.action] / self.speeds[rank]
            )
            end = start + factor * (seconds + backward_seconds)
            self.pair_under_way[rank] = start + factor * seconds, end
            return start, start + factor * seconds, end
        if number - 1 in self.links.pairs:
            start, end = self.pair_under_way[rank]
            return start, end, end
        return start, start + seconds, start + seconds

    def _update(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Update a stage's weights. A rank updates stages in turn, in parallel to its compute."""
        stage = instruction.stage
        step = instruction.step or 0
        seconds = self._memory_seconds(rank, self.update_bytes[stage])

        def begin(start: float, end: float) -> None:
            self.memory.use_sum(start, end, rank, stage, instruction.step)
            # The new version is a separate tensor: late readers still use the old one.
            self.memory.hold_weights(start, rank, stage)
            self.step_ends[step] = max(self.step_ends.get(step, 0.0), end)
            if seconds > 0:
                self._add_span(instruction, start, end, rank, UPDATE)
            self.events.end(number, end)

        optimizer_lane = (~rank,)  # ports have numbers from 0
        self.events.occupy(number, ready, optimizer_lane, seconds, begin)

    def _predict(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Read two weight versions and write one, before the next op."""
        stage = instruction.stage
        start = max(self.free_at[rank], ready)
        end = start + self._memory_seconds(rank, 3 * self.costs[stage].parameter_bytes)
        self.free_at[rank] = end
        self.memory.hold_weights(start, rank, stage)
        if end > start:
            self._add_span(instruction, start, end, rank, COMPUTE)
        self.events.end(number, end)

    def _message(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Take the ports of a message."""
        _, _, stage, _, _, _, buffer, (peer,) = instruction
        n_bytes = self.message_bytes[buffer][stage]
        is_local = self.ports.is_local(rank, peer)
        seconds = self.message_seconds[is_local][buffer][stage]
        if not seconds:  # needs no port
            self._send(number, rank, instruction, n_bytes, ready, ready)
            return
        ports = self.ports.of_message(rank, peer)
        send = partial(self._send, number, rank, instruction, n_bytes)
        self.events.occupy(number, ready, ports, seconds, send)

    def _meet(
        self, number: int, rank: int, instruction: Instruction, ready: float
    ) -> None:
        """Take the ports of a collective."""
        n_bytes = self.message_bytes[instruction.buffer][instruction.stage]
        peers = instruction.peers
        # A collective keeps both ports of all of its ranks until it ends.
        ports = self.ports.of_collective(peers)
        seconds = self.hardware.collective(instruction.action, n_bytes, peers)
        collective = partial(self._collective, number, instruction, n_bytes)
        self.events.occupy(number, ready, ports, seconds, collective)

    def _send(
        self,
        number: int,
        rank: int,
        instruction: Instruction,
        n_bytes: float,
        start: float,
        end: float,
    ) -> None:
        """Deliver a message that is under way from ``start`` to ``end``."""
        tick, _, stage, microbatch, step, version, buffer, (peer,) = instruction
        assert buffer is not None
        of_step = version if step is None else step
        content = (start, end, buffer.label, stage, microbatch, of_step, n_bytes)
        slot = tick // self.slot
        self.spans.append(_new(Span, (rank, SEND, *content, peer, slot)))
        self.spans.append(_new(Span, (peer, RECEIVE, *content, rank, slot)))
        # The op that needs it is on the receiver, where it is there only now.
        if buffer == ACTIVATION:
            key = (stage, microbatch, step)
            next_stage = self.costs[stage + 1]
            self.memory.work(rank, self.outputs[key], end, next_stage.extra_input_bytes)
            self.outputs[key] = end
            input_key = (peer, stage + 1, microbatch, step)
            self.memory.receive_input(end, input_key, next_stage.input_bytes)
        elif buffer == ACTIVATION_GRADIENT:
            key = (stage, microbatch, step)
            gradient_bytes = self.input_gradient_bytes[stage]
            self.memory.work(rank, self.input_gradients[key], end, gradient_bytes)
            self.input_gradients[key] = end
        elif buffer == Buffer.WEIGHTS:
            self.memory.receive_weights(end, peer, stage, version or 0)
        else:
            self.memory.use_sum(start, end, rank, stage, step)
            self.memory.add_to_sum(end, peer, stage, step)
        self.events.end(number, end)

    def _collective(
        self,
        number: int,
        instruction: Instruction,
        n_bytes: float,
        start: float,
        end: float,
    ) -> None:
        """Deliver a collective; its instruction is that of its root, the first of its peers."""
        root = instruction.peers[0]
        for peer in instruction.peers:
            units = float(traffic_of(instruction, peer).units)
            if units:
                self._add_span(instruction, start, end, peer, SEND, units * n_bytes)
            else:
                self._add_span(instruction, start, end, peer, RECEIVE, n_bytes)
            if peer == root:
                continue
            if instruction.action == Action.BROADCAST:
                self.memory.hold_weights(end, peer, instruction.stage)
            elif instruction.action == Action.REDUCE:
                self.memory.use_sum(
                    start, end, peer, instruction.stage, instruction.step
                )
        self.events.end(number, end)

    def _free(
        self, number: int, rank: int, instruction: Instruction, when: float
    ) -> None:
        """Free a weight version, or the activations and inputs of a micro-batch."""
        _, _, stage, microbatch, step, version, buffer, _ = instruction
        if buffer == ACTIVATION:
            self.memory.free_microbatch(when, (rank, stage, microbatch, step))
        elif buffer == Buffer.WEIGHTS:
            self.memory.free_version(when, rank, stage, version or 0)
        else:
            self.memory.free_weights(when, rank, stage)
        self.events.end(number, when)

    def _memory_seconds(self, rank: int, n_bytes: float) -> float:
        """Return the seconds to move bytes between a rank and its memory."""
        return n_bytes / self.hardware.memory_bandwidth / self.hardware.speed(rank)

    def _add_span(
        self,
        instruction: Instruction,
        start: float,
        end: float,
        rank: int,
        lane: str,
        n_bytes: float = 0.0,
    ) -> None:
        """Add a span of an update, a prediction or a collective, with the bytes that it moves."""
        span = Span(
            rank,
            lane,
            start,
            end,
            name=instruction.label,
            stage=instruction.stage,
            microbatch=instruction.microbatch,
            step=instruction.of_step,
            bytes=n_bytes,
            slot=instruction.tick // self.slot,
        )
        self.spans.append(span)

"""Handle the instructions of a program in order of time, each when its dependencies have ended.

An instruction waits for those whose results it uses, as in the runtime: see
:func:`toolkit.schedule.dependencies.needs`. The ops of a rank keep the order of its program, and so
do its collectives. A message waits until its receiver expects it and both ranks are within the
schedule's lookahead. Then it takes its ports as soon as all of them idle; of messages that want
the same, the first in the program goes first: by tick, then what ops wait for, gradients, weights.

Ops, and what needs no port, may be handled before others that begin earlier: they have nothing to
share. Messages are handled in order of time.

If ports are shared, messages from one rank to another follow each other, and all others that are
ready are under way together: see :mod:`toolkit.cost.shared_ports`.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from math import inf
from typing import NamedTuple

from toolkit.cost.shared_ports import SharedPorts
from toolkit.schedule import Action, Buffer, Instruction, Program
from toolkit.schedule.dependencies import unsorted_needs
from toolkit.schedule.instruction import FORWARD, RECV, SEND

Ports = tuple[int, ...]
_Lanes = tuple[Hashable, ...]

OnStart = Callable[[float, float], None]
"""Gets the start and the end of a message or an update, once its lanes are free."""

Handler = Callable[[int, int, Instruction, float], None]
"""Gets the number of an instruction, its rank, itself and the time from which it may begin."""

_FREES = -1  # the tick of an event that frees lanes: it comes before others of its time
_IN_ORDER = frozenset(action for action in Action if action.computes or action == Action.PREDICT)


class _Event(NamedTuple):
    """A wish for ``lanes`` for some seconds, or the end of it if the tick is ``_FREES``.

    ``on_start`` gets start and end. If ``ports`` are given, others share them meanwhile, which
    takes longer. Events are served by time, then by tick, kind and number.
    """

    when: float
    tick: int
    kind: int
    number: int
    lanes: _Lanes
    seconds: float
    on_start: OnStart
    ports: Ports = ()


class EventQueue:
    """Dependencies of instructions, and busy ports.

    Instructions have numbers, rank by rank; a send stands for its receive, too, and the root's
    instruction for all of a collective.

    Attributes:
        pairs: numbers of forwards that overlap with the next instruction.
    """

    def __init__(self, program: Program, *, shared: bool = False) -> None:
        self.pairs: set[int] = set()
        self._instructions: list[Instruction] = []
        self._ranks: list[int] = []
        for rank, order in enumerate(program.ranks):
            self._instructions += order
            self._ranks += [rank] * len(order)

        # Dependencies: what each instruction still waits for, and who waits for it.
        self._n_missing = [0] * len(self._instructions)
        self._ready_times = [0.0] * len(self._instructions)
        self._users: list[list[int]] = [[] for _ in self._instructions]
        representatives = self._representatives()
        self._link(program, representatives)
        self._ready = [
            number
            for number, n_missing in enumerate(self._n_missing)
            if not n_missing and representatives[number] == number
        ]

        # Lanes: those that are busy, and the events that wait for the same ones.
        self._events: list[_Event] = []
        self._busy: set[Hashable] = set()
        self._waiting: defaultdict[_Lanes, list[tuple[int, int, int, _Event]]] = defaultdict(list)
        self._wanted: defaultdict[Hashable, set[_Lanes]] = defaultdict(set)
        self._shared = SharedPorts() if shared else None
        self._sharing: dict[int, tuple[float, _Event]] = {}  # what shares ports, and since when

    def _representatives(self) -> list[int]:
        """Return what stands for each instruction: a receive's send, a collective's root."""
        representatives = [*range(len(self._instructions))]
        sends: defaultdict[tuple, list[int]] = defaultdict(list)
        receives: defaultdict[tuple, list[int]] = defaultdict(list)
        collectives: defaultdict[tuple, list[int]] = defaultdict(list)
        for number, instruction in enumerate(self._instructions):
            peers = instruction.peers
            if not peers:
                continue
            rank = self._ranks[number]
            if instruction.action == SEND:
                sends[rank, peers[0]].append(number)
            elif instruction.action == RECV:
                receives[peers[0], rank].append(number)
            else:
                collectives[instruction[1:]].append(number)

        # Messages from one rank to another have the same order on both, as have collectives.
        for rank_pair, receive_numbers in receives.items():
            for number, send_number in zip(receive_numbers, sends[rank_pair], strict=True):
                representatives[number] = send_number
        for numbers in collectives.values():
            # Numbers grow with ranks: first all occurrences on the lowest rank, then on the next.
            peers = self._instructions[numbers[0]].peers
            n_occurrences = len(numbers) // len(peers)
            root_position = sorted(peers).index(peers[0])
            for occurrence in range(n_occurrences):
                root_number = numbers[occurrence + root_position * n_occurrences]
                for number in numbers[occurrence::n_occurrences]:
                    representatives[number] = root_number
        return representatives

    def _link(self, program: Program, representatives: list[int]) -> None:
        """Count what each instruction waits for, and list the users of each."""
        n_missing = self._n_missing
        users = self._users
        first_number = 0
        for rank, order in enumerate(program.ranks):
            needs: Iterable[list[int]] = unsorted_needs(order, rank)
            pairs: list[int] = []
            if not program.schedule.layout.one_device:
                pairs = _pairs(order)
            if pairs:
                # The forward of a pair waits for what its backward needs: both start together.
                needs = [*needs]
                for index in pairs:
                    needs[index] += [needed for needed in needs[index + 1] if needed != index]
                    self.pairs.add(first_number + index)
            waits = _waits(order, needs, program.schedule.lookahead)
            for index, needed_indices in enumerate(waits):
                number = representatives[first_number + index]
                n_missing[number] += len(needed_indices)
                for needed_index in needed_indices:
                    users[representatives[first_number + needed_index]].append(number)
            first_number += len(order)

    def run(self, handlers: Mapping[Action, Handler], until: float, since: float) -> None:
        """Run the instructions before the tick ``until``, from ``since`` seconds on.

        ``handlers[action]`` runs an instruction once what it needs has ended. It says when the
        instruction ends (:meth:`end`), or what ports it takes (:meth:`occupy`).
        """
        later_numbers = []
        while self._ready or self._events or self._sharing:
            while self._ready:
                number = self._ready.pop()
                instruction = self._instructions[number]
                if instruction.tick >= until:
                    later_numbers.append(number)
                    continue
                ready_time = self._ready_times[number]
                if ready_time < since:
                    ready_time = since
                handlers[instruction.action](number, self._ranks[number], instruction, ready_time)
            next_time = self._events[0].when if self._events else inf
            if self._shared and self._shared.next_end() <= next_time:
                self._end_sharing(self._shared)
            elif self._events:
                self._serve()
        self._ready = later_numbers

    def _end_sharing(self, shared: SharedPorts) -> None:
        """End the messages with shared ports that are the next to end."""
        now = shared.next_end()
        for number in shared.end(now):
            start, event = self._sharing.pop(number)
            heappush(self._events, event._replace(when=now, tick=_FREES))
            event.on_start(start, now)

    def _serve(self) -> None:
        """Free and take lanes at the time of the next event."""
        now = self._events[0].when

        # 1. All events of this time: lanes become free, or are wanted.
        lanes_to_serve: set[_Lanes] = set()
        while self._events and self._events[0].when == now:
            event = heappop(self._events)
            if event.tick == _FREES:
                self._busy.difference_update(event.lanes)
                for lane in event.lanes:
                    lanes_to_serve |= self._wanted[lane]
            else:
                heappush(self._waiting[event.lanes], (*event[1:4], event))
                for lane in event.lanes:
                    self._wanted[lane].add(event.lanes)
                lanes_to_serve.add(event.lanes)

        # 2. The first event for each of these lanes takes them if all are idle.
        begun_messages: dict[int, tuple[float, Ports]] = {}
        for *_, event in sorted(self._waiting[lanes][0] for lanes in lanes_to_serve):
            if not self._busy.isdisjoint(event.lanes):
                continue
            heappop(self._waiting[event.lanes])
            if not self._waiting[event.lanes]:
                for lane in event.lanes:
                    self._wanted[lane].discard(event.lanes)
            self._busy.update(event.lanes)
            if event.ports:
                begun_messages[event.number] = event.seconds, event.ports
                self._sharing[event.number] = now, event
            else:
                end = now + event.seconds
                heappush(self._events, event._replace(when=end, tick=_FREES))
                event.on_start(now, end)

        # 3. Messages that begin together get their rates together.
        if self._shared and begun_messages:
            self._shared.begin(now, begun_messages)

    def instruction(self, number: int) -> Instruction:
        """Return the instruction with this number."""
        return self._instructions[number]

    def occupy(
        self, number: int, ready: float, ports: Ports, seconds: float, on_start: OnStart
    ) -> None:
        """Take ``ports`` for ``seconds`` as soon as all idle; messages that share take longer."""
        if seconds == 0:  # needs no port
            on_start(ready, ready)
            return
        instruction = self._instructions[number]
        kind = instruction.buffer or Buffer.ACTIVATION
        lanes: _Lanes = ports
        shared_ports: Ports = ()
        if self._shared is not None and instruction.peers:
            # Messages to the same ranks follow each other; others are under way together.
            lanes = ((self._ranks[number], instruction.peers),)
            shared_ports = ports
        event = _Event(
            ready, instruction.tick, kind, number, lanes, seconds, on_start, shared_ports
        )
        heappush(self._events, event)

    def end(self, number: int, when: float) -> None:
        """End an instruction; those that waited only for it become ready."""
        ready_times = self._ready_times
        n_missing = self._n_missing
        for user in self._users[number]:
            if ready_times[user] < when:
                ready_times[user] = when
            n_missing[user] -= 1
            if not n_missing[user]:
                self._ready.append(user)


def _pairs(order: Sequence[Instruction]) -> list[int]:
    """Return the positions of a rank's forwards that start with the next op, so both overlap."""
    return [
        index
        for index, (instruction, next_instruction) in enumerate(pairwise(order))
        if instruction.action == FORWARD
        and instruction.tick == next_instruction.tick
        and next_instruction.action.computes
    ]


def _waits(
    order: Sequence[Instruction], needs: Iterable[list[int]], lookahead: int
) -> Iterator[list[int]]:
    """Yield the positions that each instruction of a rank waits for.

    - Ops run in order, so that of several ops the last one is enough, and each waits for the one
      before it.
    - A message or collective waits for the last op that starts before its lookahead.
    - Collectives run in order.
    """
    in_order = [instruction.action in _IN_ORDER for instruction in order]
    ops = [
        (instruction.tick, index)
        for index, instruction in enumerate(order)
        if instruction.action.computes
    ]
    coming_ops = iter([*ops, (inf, -1)])
    next_tick, next_op = next(coming_ops)  # the first op within the lookahead
    previous_op = -1
    previous_collective = -1
    op_before_lookahead = -1
    for index, needed_indices in enumerate(needs):
        instruction = order[index]
        waited_indices = []
        last_op = -1
        for needed_index in needed_indices:
            if not in_order[needed_index]:
                waited_indices.append(needed_index)
            elif needed_index > last_op:
                last_op = needed_index
        if in_order[index]:
            last_op = previous_op
            previous_op = index
        elif instruction.peers:
            while next_tick < instruction.tick - lookahead:
                op_before_lookahead = next_op
                next_tick, next_op = next(coming_ops)
            if op_before_lookahead > last_op:
                last_op = op_before_lookahead
            if instruction.action > RECV:
                if previous_collective >= 0:
                    waited_indices.append(previous_collective)
                previous_collective = index
        if last_op >= 0:
            waited_indices.append(last_op)
        yield waited_indices

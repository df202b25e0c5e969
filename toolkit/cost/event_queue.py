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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
Then = Callable[[float, float], None]

Begin = Callable[[int, int, Instruction, float], None]

_FREES = -1  # the tick of an event that frees ports: it comes before others of its time
_IN_ORDER = frozenset(action for action in Action if action.computes or action == Action.PREDICT)


class _Event(NamedTuple):
    """``lanes`` are wanted for ``seconds``, and ``then`` gets start and end; at _FREES, free again.

    If ``ports`` are given, they are shared meanwhile, which takes longer.
    """

    when: float
    tick: int
    kind: int
    number: int
    lanes: _Lanes
    seconds: float
    then: Then
    ports: Ports = ()


def _pairs(order: Sequence[Instruction]) -> list[int]:
    """Return the positions of a rank's forwards that start with the next op, so both overlap."""
    return [
        index
        for index, (instruction, next_instruction) in enumerate(pairwise(order))
        if instruction.action == FORWARD
        and instruction.tick == next_instruction.tick
        and next_instruction.action.computes
    ]


class EventQueue:
    """Dependencies of instructions, and busy ports.

    Instructions have numbers, rank by rank; a send stands for its receive, too, and the root's
    instruction for all of a collective.
    """

    def __init__(self, program: Program, *, shared: bool = False) -> None:
        self._instructions = [instruction for order in program.ranks for instruction in order]
        self._ranks = [rank for rank, order in enumerate(program.ranks) for _ in order]
        self.pairs: set[int] = set()  # forwards that overlap with the next instruction
        self._lacking = [0] * len(self._instructions)
        self._ready = [0.0] * len(self._instructions)
        self._users: list[list[int]] = [[] for _ in self._instructions]
        representative = self._numbers()
        self._link(program, representative)
        ready_indices = (index for index, n_missing in enumerate(self._lacking) if not n_missing)
        self._open = [index for index in ready_indices if representative[index] == index]
        self._events: list[_Event] = []
        self._busy: set[Hashable] = set()
        self._waiting: defaultdict[_Lanes, list[tuple[int, int, int, _Event]]] = defaultdict(list)
        self._wanted: defaultdict[Hashable, set[_Lanes]] = defaultdict(set)
        self._shared = SharedPorts() if shared else None
        self._sharing: dict[int, tuple[float, _Event]] = {}  # what shares ports, and since when

    def _numbers(self) -> list[int]:
        """Return what stands for each instruction: a receive's send, a collective's root."""
        representative = [*range(len(self._instructions))]
        sends: defaultdict[tuple, list[int]] = defaultdict(list)
        receives: defaultdict[tuple, list[int]] = defaultdict(list)
        collectives: defaultdict[tuple, list[int]] = defaultdict(list)
        for index, (rank, instruction) in enumerate(
            zip(self._ranks, self._instructions, strict=True)
        ):
            if not (peers := instruction.peers):
                continue
            if instruction.action == SEND:
                sends[rank, peers[0]].append(index)
            elif instruction.action == RECV:
                receives[peers[0], rank].append(index)
            else:
                collectives[instruction[1:]].append(index)
        # Messages from one rank to another have the same order on both, as have collectives.
        for rank_pair, receive_indices in receives.items():
            for index, send_index in zip(receive_indices, sends[rank_pair], strict=True):
                representative[index] = send_index
        for members in collectives.values():
            peers = self._instructions[members[0]].peers
            n_occurrences, root_position = len(members) // len(peers), sorted(peers).index(peers[0])
            for occurrence in range(n_occurrences):
                for index in members[occurrence::n_occurrences]:
                    representative[index] = members[occurrence + root_position * n_occurrences]
        return representative

    def _link(self, program: Program, number: list[int]) -> None:
        """Count what each instruction waits for, and list the users of each."""
        n_missing, users, lookahead = self._lacking, self._users, program.schedule.lookahead
        first_index = 0
        for rank, order in enumerate(program.ranks):
            in_order = [instruction.action in _IN_ORDER for instruction in order]
            needs: Iterable[list[int]] = unsorted_needs(order, rank)
            if pairs := [] if program.schedule.layout.one_device else _pairs(order):
                needs = [*needs]
                for index_in_rank in pairs:
                    needs[index_in_rank] += [
                        needed_index
                        for needed_index in needs[index_in_rank + 1]
                        if needed_index != index_in_rank
                    ]
                    self.pairs.add(first_index + index_in_rank)
            ops = [
                (instruction.tick, index_in_rank)
                for index_in_rank, instruction in enumerate(order)
                if instruction.action.computes
            ]
            previous_op = collective = op_before_lookahead = -1
            coming_ops = iter([*ops, (inf, -1)])
            tick, op = next(coming_ops)  # the first op within the lookahead
            for index_in_rank, needed_indices in enumerate(needs):
                instruction = order[index_in_rank]
                waited_indices, last_op = [], -1
                for needed_index in needed_indices:
                    if not in_order[needed_index]:
                        waited_indices.append(needed_index)
                    elif needed_index > last_op:  # ops end in order: the last is enough
                        last_op = needed_index
                if in_order[index_in_rank]:
                    last_op, previous_op = previous_op, index_in_rank
                elif instruction.peers:
                    while tick < instruction.tick - lookahead:
                        op_before_lookahead = op
                        tick, op = next(coming_ops)
                    if op_before_lookahead > last_op:
                        last_op = op_before_lookahead
                    if instruction.action > RECV:
                        if collective >= 0:
                            waited_indices.append(collective)
                        collective = index_in_rank
                if last_op >= 0:
                    waited_indices.append(last_op)
                index = number[first_index + index_in_rank]
                n_missing[index] += len(waited_indices)
                for needed_index in waited_indices:
                    users[number[first_index + needed_index]].append(index)
            first_index += len(order)

    def run(self, begin: Mapping[Action, Begin], until: float, since: float) -> None:
        """Run the instructions before the tick ``until``, from ``since`` seconds on.

        ``begin[action]`` gets the number of an instruction, its rank, itself and when it may begin.
        It says when it ends (:meth:`end`), or what ports it takes (:meth:`occupy`).
        """
        later_indices = []
        while self._open or self._events or self._sharing:
            while self._open:
                index = self._open.pop()
                instruction = self._instructions[index]
                if instruction.tick >= until:
                    later_indices.append(index)
                else:
                    ready_time = self._ready[index]
                    begin[instruction.action](
                        index,
                        self._ranks[index],
                        instruction,
                        ready_time if ready_time > since else since,
                    )
            next_time = self._events[0].when if self._events else inf
            if self._shared and self._shared.next_end() <= next_time:
                self._end_sharing(self._shared)
            elif self._events:
                self._serve()
        self._open = later_indices

    def _end_sharing(self, shared: SharedPorts) -> None:
        """End the messages with shared ports that are the next to end."""
        now = shared.next_end()
        for number in shared.end(now):
            start, event = self._sharing.pop(number)
            heappush(self._events, event._replace(when=now, tick=_FREES))
            event.then(start, now)

    def _serve(self) -> None:
        """Free and take lanes at the time of the next event."""
        now = self._events[0].when
        lanes_to_serve: set[_Lanes] = set()
        begun_messages: dict[int, tuple[float, Ports]] = {}
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
        for *_, event in sorted(self._waiting[lanes][0] for lanes in lanes_to_serve):
            if self._busy.isdisjoint(event.lanes):
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
                    event.then(now, end)
        if self._shared and begun_messages:
            self._shared.begin(now, begun_messages)

    def instruction(self, g: int) -> Instruction:
        """Return the instruction with number ``g``."""
        return self._instructions[g]

    def occupy(self, g: int, ready: float, ports: Ports, seconds: float, then: Then) -> None:
        """Take ``ports`` for ``seconds`` as soon as all idle; ``then`` gets start and end.

        Messages take longer if they share them.
        """
        if seconds == 0:  # needs no port
            then(ready, ready)
            return
        instruction = self._instructions[g]
        event = _Event(
            ready,
            instruction.tick,
            instruction.buffer or Buffer.ACTIVATION,
            g,
            ports,
            seconds,
            then,
        )
        if self._shared is not None and instruction.peers:
            event = event._replace(lanes=((self._ranks[g], instruction.peers),), ports=ports)
        heappush(self._events, event)

    def end(self, g: int, when: float) -> None:
        """End an instruction; those that waited only for it become ready."""
        ready_times, n_missing = self._ready, self._lacking
        for user in self._users[g]:
            if ready_times[user] < when:
                ready_times[user] = when
            n_missing[user] -= 1
            if not n_missing[user]:
                self._open.append(user)

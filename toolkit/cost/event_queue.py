"""The instructions of a program in order of time, each when it has what it waits for.

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
    """The positions of forwards that start with the next op: on one rank, those that overlap."""
    return [
        p
        for p, (i, after) in enumerate(pairwise(order))
        if i.action == FORWARD and i.tick == after.tick and after.action.computes
    ]


class EventQueue:
    """What each instruction waits for; which ports are busy.

    Instructions have numbers, rank by rank; a send stands for its receive, too, and the root's
    instruction for all of a collective.
    """

    def __init__(self, program: Program, *, shared: bool = False) -> None:
        self._instructions = [i for order in program.ranks for i in order]
        self._ranks = [rank for rank, order in enumerate(program.ranks) for _ in order]
        self.pairs: set[int] = set()  # forwards that overlap with the next instruction
        self._lacking = [0] * len(self._instructions)
        self._ready = [0.0] * len(self._instructions)
        self._users: list[list[int]] = [[] for _ in self._instructions]
        number = self._numbers()
        self._link(program, number)
        nothing = (g for g, lacking in enumerate(self._lacking) if not lacking)
        self._open = [g for g in nothing if number[g] == g]
        self._events: list[_Event] = []
        self._busy: set[Hashable] = set()
        self._waiting: defaultdict[_Lanes, list[tuple[int, int, int, _Event]]] = defaultdict(list)
        self._wanted: defaultdict[Hashable, set[_Lanes]] = defaultdict(set)
        self._shared = SharedPorts() if shared else None
        self._sharing: dict[int, tuple[float, _Event]] = {}  # what shares ports, and since when

    def _numbers(self) -> list[int]:
        """The number of what stands for each instruction."""
        number = [*range(len(self._instructions))]
        sends: defaultdict[tuple, list[int]] = defaultdict(list)
        receives: defaultdict[tuple, list[int]] = defaultdict(list)
        collectives: defaultdict[tuple, list[int]] = defaultdict(list)
        for g, (rank, i) in enumerate(zip(self._ranks, self._instructions, strict=True)):
            if not (peers := i.peers):
                continue
            if i.action == SEND:
                sends[rank, peers[0]].append(g)
            elif i.action == RECV:
                receives[peers[0], rank].append(g)
            else:
                collectives[i[1:]].append(g)
        # Messages from one rank to another have the same order on both, as have collectives.
        for pair, received in receives.items():
            for g, send in zip(received, sends[pair], strict=True):
                number[g] = send
        for found in collectives.values():
            peers = self._instructions[found[0]].peers
            times, root = len(found) // len(peers), sorted(peers).index(peers[0])
            for k in range(times):
                for g in found[k::times]:
                    number[g] = found[k + root * times]
        return number

    def _link(self, program: Program, number: list[int]) -> None:
        """Find what each instruction waits for."""
        lacking, users, ahead = self._lacking, self._users, program.schedule.lookahead
        first = 0
        for rank, order in enumerate(program.ranks):
            in_order = [i.action in _IN_ORDER for i in order]
            needs: Iterable[list[int]] = unsorted_needs(order, rank)
            if pairs := [] if program.schedule.layout.one_device else _pairs(order):
                needs = [*needs]
                for p in pairs:
                    needs[p] += [q for q in needs[p + 1] if q != p]
                    self.pairs.add(first + p)
            ops = [(i.tick, p) for p, i in enumerate(order) if i.action.computes]
            before = collective = further = -1
            coming = iter([*ops, (inf, -1)])
            tick, op = next(coming)  # the first op within the lookahead
            for p, found in enumerate(needs):
                i = order[p]
                waits, last = [], -1
                for q in found:
                    if not in_order[q]:
                        waits.append(q)
                    elif q > last:  # of ops the last is enough
                        last = q
                if in_order[p]:
                    last, before = before, p
                elif i.peers:
                    while tick < i.tick - ahead:
                        further = op
                        tick, op = next(coming)
                    if further > last:
                        last = further
                    if i.action > RECV:
                        if collective >= 0:
                            waits.append(collective)
                        collective = p
                if last >= 0:
                    waits.append(last)
                g = number[first + p]
                lacking[g] += len(waits)
                for q in waits:
                    users[number[first + q]].append(g)
            first += len(order)

    def run(self, begin: Mapping[Action, Begin], until: float, since: float) -> None:
        """Carry out what stands before the tick ``until``, from ``since`` seconds on.

        ``begin[action]`` gets the number of an instruction, its rank, itself and when it may begin.
        It says when it ends (:meth:`end`), or what ports it takes (:meth:`occupy`).
        """
        later = []
        while self._open or self._events or self._sharing:
            while self._open:
                g = self._open.pop()
                i = self._instructions[g]
                if i.tick >= until:
                    later.append(g)
                else:
                    ready = self._ready[g]
                    begin[i.action](g, self._ranks[g], i, ready if ready > since else since)
            coming = self._events[0].when if self._events else inf
            if self._shared and self._shared.next_end() <= coming:
                self._end_sharing(self._shared)
            elif self._events:
                self._serve()
        self._open = later

    def _end_sharing(self, shared: SharedPorts) -> None:
        """End those of the messages that share ports which are the next to end."""
        now = shared.next_end()
        for number in shared.end(now):
            start, event = self._sharing.pop(number)
            heappush(self._events, event._replace(when=now, tick=_FREES))
            event.then(start, now)

    def _serve(self) -> None:
        """Free and take lanes at the next moment at which something happens."""
        now = self._events[0].when
        wanted: set[_Lanes] = set()
        begun: dict[int, tuple[float, Ports]] = {}
        while self._events and self._events[0].when == now:
            event = heappop(self._events)
            if event.tick == _FREES:
                self._busy.difference_update(event.lanes)
                for lane in event.lanes:
                    wanted |= self._wanted[lane]
            else:
                heappush(self._waiting[event.lanes], (*event[1:4], event))
                for lane in event.lanes:
                    self._wanted[lane].add(event.lanes)
                wanted.add(event.lanes)
        for *_, event in sorted(self._waiting[lanes][0] for lanes in wanted):
            if self._busy.isdisjoint(event.lanes):
                heappop(self._waiting[event.lanes])
                if not self._waiting[event.lanes]:
                    for lane in event.lanes:
                        self._wanted[lane].discard(event.lanes)
                self._busy.update(event.lanes)
                if event.ports:
                    begun[event.number] = event.seconds, event.ports
                    self._sharing[event.number] = now, event
                else:
                    end = now + event.seconds
                    heappush(self._events, event._replace(when=end, tick=_FREES))
                    event.then(now, end)
        if self._shared and begun:
            self._shared.begin(now, begun)

    def instruction(self, g: int) -> Instruction:
        """The instruction with a number."""
        return self._instructions[g]

    def occupy(self, g: int, ready: float, ports: Ports, seconds: float, then: Then) -> None:
        """Take ``ports`` for ``seconds`` as soon as all idle; ``then`` gets start and end.

        Messages take longer if they share them.
        """
        if seconds == 0:  # needs no port
            then(ready, ready)
            return
        i = self._instructions[g]
        event = _Event(ready, i.tick, i.buffer or Buffer.ACTIVATION, g, ports, seconds, then)
        if self._shared is not None and i.peers:
            event = event._replace(lanes=((self._ranks[g], i.peers),), ports=ports)
        heappush(self._events, event)

    def end(self, g: int, when: float) -> None:
        """Let begin what waited for an instruction, and for nothing else."""
        ready, lacking = self._ready, self._lacking
        for user in self._users[g]:
            if ready[user] < when:
                ready[user] = when
            lacking[user] -= 1
            if not lacking[user]:
                self._open.append(user)

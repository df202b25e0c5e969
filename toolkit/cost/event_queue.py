"""Handle the instructions of a program in order of time, each when its dependencies have ended.

What an instruction waits for is in :mod:`toolkit.cost.program_links`. A message that waits for
nothing else takes its ports as soon as all of them idle; of messages that want the same, the first
in the program goes first: by tick, then what ops wait for, gradients, weights.

Ops, and what needs no port, may be handled before others that begin earlier: they have nothing to
share. Messages are handled in order of time.

If ports are shared, messages from one rank to another follow each other, and all others that are
ready are under way together: see :mod:`toolkit.cost.shared_ports`.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from toolkit.cost.program_links import ProgramLinks
from toolkit.cost.shared_ports import SharedPorts
from toolkit.schedule import Action, Buffer, Instruction

Ports = tuple[int, ...]
_Lanes = tuple[Hashable, ...]

OnStart = Callable[[float, float], None]
"""Gets the start and the end of a message or an update, once its lanes are free."""

Handler = Callable[[int, int, Instruction, float], None]
"""Gets the number of an instruction, its rank, itself and the time from which it may begin."""

_FREES = -1  # the tick of an event that frees lanes: it comes before others of its time

_Event = tuple[float, int, int, int]
"""Time, tick, kind and number of a wish for lanes; its end if the tick is ``_FREES``.

Events are served in this order."""


class _Wish(NamedTuple):
    """A wish for ``lanes`` for some seconds.

    ``on_start`` gets start and end. If ``ports`` are given, others share them meanwhile, which
    takes longer.
    """

    lanes: _Lanes
    seconds: float
    on_start: OnStart
    ports: Ports = ()


class EventQueue:
    """How far the instructions of a program have come, and busy ports.

    Args:
        links: what each instruction waits for.
        shared: whether messages share the bandwidth of ports.
    """

    def __init__(self, links: ProgramLinks, *, shared: bool = False) -> None:
        self._instructions = links.instructions
        self._ranks = links.ranks
        self._users = links.users
        self._n_awaited = [*links.n_awaited]
        self._ready_times = [0.0] * len(links.instructions)
        self._ready = [*links.unblocked]

        # Lanes: those that are busy, and the events that wait for the same ones.
        self._events: list[_Event] = []
        self._wishes: dict[int, _Wish] = {}  # by number
        self._busy: set[Hashable] = set()
        # A heap for each set of lanes that is wanted: only its first event can be the next to take
        # them.
        self._waiting: defaultdict[_Lanes, list[tuple[int, int, int]]] = defaultdict(
            list
        )
        # The sets of lanes that wait for a lane, so that a lane that becomes free finds them.
        self._wanted: defaultdict[Hashable, set[_Lanes]] = defaultdict(set)
        self._shared = SharedPorts() if shared else None
        # Start of what shares ports, by number.
        self._shared_since: dict[int, float] = {}

    def run(
        self, handlers: Mapping[Action, Handler], until: float, since: float
    ) -> None:
        """Run the instructions before the tick ``until``, from ``since`` seconds on.

        ``handlers[action]`` runs an instruction once what it needs has ended. It says when the
        instruction ends (:meth:`end`), or what ports it takes (:meth:`occupy`).
        """
        ready = self._ready
        instructions = self._instructions
        ranks = self._ranks
        ready_times = self._ready_times
        handler_of_action = [handlers[action] for action in Action]
        later_numbers = []
        while ready or self._events or self._shared_since:
            # First all that is ready: its wishes may come before the next event.
            while ready:
                # In any order: what is ready shares nothing but lanes, and these are given in order
                # of time.
                number = ready.pop()
                instruction = instructions[number]
                if instruction.tick >= until:
                    later_numbers.append(number)
                    continue
                ready_time = ready_times[number]
                if ready_time < since:
                    ready_time = since
                handle = handler_of_action[instruction.action]
                handle(number, ranks[number], instruction, ready_time)
            next_time = self._events[0][0] if self._events else inf
            if self._shared and self._shared.next_end() <= next_time:
                # At equal times ends come first: what ends makes room for what begins.
                self._end_sharing(self._shared)
            elif self._events:
                self._serve()
        # They are for the next call, which begins at `until`.
        ready += later_numbers

    def _end_sharing(self, shared: SharedPorts) -> None:
        """End the messages with shared ports that are the next to end."""
        now = shared.next_end()
        for number in shared.end(now):
            heappush(self._events, (now, _FREES, 0, number))
            self._wishes[number].on_start(self._shared_since.pop(number), now)

    def _serve(self) -> None:
        """Free and take lanes at the time of the next event."""
        events = self._events
        wishes = self._wishes
        now = events[0][0]

        # 1. All events of this time: lanes become free, or are wanted.
        lanes_to_serve: set[_Lanes] = set()
        while events and events[0][0] == now:
            _, tick, kind, number = heappop(events)
            if tick == _FREES:
                lanes = wishes.pop(number).lanes
                self._busy.difference_update(lanes)
                for lane in lanes:
                    lanes_to_serve |= self._wanted[lane]
            else:
                lanes = wishes[number].lanes
                heappush(self._waiting[lanes], (tick, kind, number))
                for lane in lanes:
                    self._wanted[lane].add(lanes)
                lanes_to_serve.add(lanes)

        # 2. The first event for each of these lanes takes them if all are idle.
        begun_messages: dict[int, tuple[float, Ports]] = {}
        # `_wanted` has only lanes for which an event still waits, so each of these has a first.
        for _, _, number in sorted(self._waiting[lanes][0] for lanes in lanes_to_serve):
            lanes, seconds, on_start, ports = wishes[number]
            # All lanes or none: messages that held one lane and waited for another could wait for
            # each other in a ring.
            if not self._busy.isdisjoint(lanes):
                continue
            waiting = self._waiting[lanes]
            heappop(waiting)
            if not waiting:
                for lane in lanes:
                    self._wanted[lane].discard(lanes)
            self._busy.update(lanes)
            if ports:
                begun_messages[number] = seconds, ports
                self._shared_since[number] = now
            else:
                end = now + seconds
                heappush(events, (end, _FREES, 0, number))
                on_start(now, end)

        # 3. Messages that begin together get their rates together.
        if self._shared and begun_messages:
            self._shared.begin(now, begun_messages)

    def occupy(
        self, number: int, ready: float, ports: Ports, seconds: float, on_start: OnStart
    ) -> None:
        """Take ``ports`` for ``seconds`` as soon as all idle; messages that share take longer."""
        if seconds == 0:  # needs no port
            on_start(ready, ready)
            return
        instruction = self._instructions[number]
        kind = instruction.buffer or Buffer.ACTIVATION
        if self._shared is not None and instruction.peers:
            # Messages to the same ranks follow each other; others are under way together.
            lanes: _Lanes = ((self._ranks[number], instruction.peers),)
            self._wishes[number] = _Wish(lanes, seconds, on_start, ports)
        else:
            self._wishes[number] = _Wish(ports, seconds, on_start)
        # The order of the tuple is the order of service: time, then the program's order.
        heappush(self._events, (ready, instruction.tick, kind, number))

    def end(self, number: int, when: float) -> None:
        """End an instruction; those that waited only for it become ready."""
        # An instruction starts when the last one that it waits for has ended, so its time is a
        # maximum.
        ready_times = self._ready_times
        n_awaited = self._n_awaited
        for user in self._users[number]:
            if ready_times[user] < when:
                ready_times[user] = when
            n_awaited[user] -= 1
            if not n_awaited[user]:
                self._ready.append(user)

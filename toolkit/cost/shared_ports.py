"""Messages that share the bandwidth of ports, as connections of TCP do.

Rates are max-min fair: all grow alike until a port is full; those through it stay, the others grow
on (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from math import inf

Ports = tuple[int, ...]


class SharedPorts:
    """Messages under way, with their ports and their ends if no other message begins."""

    def __init__(self) -> None:
        self._now = 0.0
        self._left: dict[int, float] = {}  # seconds that each would take alone
        self._ports: dict[int, Ports] = {}
        self._ends: dict[int, float] = {}
        # Whether messages have begun or ended since rates were found.
        self._has_changed = False

    def next_end(self) -> float:
        """Return the earliest end; infinity without messages."""
        # Messages often end and begin at one time: their rates are found once.
        if self._has_changed:
            self._share()
        return min(self._ends.values(), default=inf)

    def begin(self, now: float, seconds: Mapping[int, tuple[float, Ports]]) -> None:
        """Begin messages: by number, the seconds that each takes alone, and its ports."""
        self._advance(now)
        for number, (seconds_alone, ports) in seconds.items():
            self._left[number] = seconds_alone
            self._ports[number] = ports
        self._has_changed = True

    def end(self, now: float) -> list[int]:
        """Remove and return the messages that end by ``now``, which is at most the next end."""
        # Sorted, so that ties are served in the program's order, and a simulation repeats exactly.
        ended = sorted(number for number, end in self._ends.items() if end <= now)
        self._advance(now)
        for number in ended:
            del self._left[number]
            del self._ports[number]
            del self._ends[number]
        self._has_changed = True
        return ended

    def _advance(self, now: float) -> None:
        """Reduce what is left of each message by the time since the last event."""
        for number, end in self._ends.items():
            # Rates were constant since `_now`, so what is left shrinks in proportion.
            total_seconds = end - self._now
            share_left = 0.0
            if total_seconds > 0:
                share_left = (end - now) / total_seconds
            self._left[number] *= share_left
        self._now = now

    def _share(self) -> None:
        """Set the end of each message by its fair rate."""
        rates = fair_rates(tuple(self._ports.values()))
        for number, rate in zip(self._ports, rates, strict=True):
            self._ends[number] = self._now + self._left[number] / rate
        self._has_changed = False


# Steps repeat, and so do the messages that are under way together.
@lru_cache(maxsize=2**14)
def fair_rates(ports: tuple[Ports, ...]) -> tuple[float, ...]:
    """Return the share of each message, of 1 a port.

    Messages a and b go through port 0; b, c and d through port 1::

        port 0   a b        Port 1 is full first: b, c and d get 1/3 each.
        port 1     b c d    Then a takes what is left of port 0: 2/3.

    Args:
        ports: of each message.
    """
    users: defaultdict[int, list[int]] = defaultdict(list)  # messages through each port
    for message, ports_of_message in enumerate(ports):
        for port in ports_of_message:
            users[port].append(message)

    # 1. Messages that meet no other, which are most, have their ports alone.
    rates: dict[int, float] = {}
    sharing: list[int] = []
    for message, ports_of_message in enumerate(ports):
        if all(len(users[port]) == 1 for port in ports_of_message):
            rates[message] = 1.0
        else:
            sharing.append(message)

    # 2. Of the others, those through the port that fills up first while all rates grow alike.
    n_unassigned = {
        port: len(users[port]) for message in sharing for port in ports[message]
    }
    free_share = dict.fromkeys(n_unassigned, 1.0)

    def assign(message: int, rate: float) -> None:
        """Let a message keep this rate from now on; each of its ports has so much less."""
        rates[message] = rate
        for port in ports[message]:
            free_share[port] -= rate
            n_unassigned[port] -= 1
            # A port without further messages never fills up. It must not be chosen again.
            if not n_unassigned[port]:
                del n_unassigned[port]

    while n_unassigned:
        # Of ports that fill up together the lowest counts, so that a simulation repeats exactly.
        rate, full_port = min(
            (free_share[port] / n_messages, port)
            for port, n_messages in n_unassigned.items()
        )
        for message in users[full_port]:
            if message not in rates:
                assign(message, rate)
    return tuple(rates[message] for message in range(len(ports)))

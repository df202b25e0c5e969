"""Messages that share the bandwidth of ports, as connections of TCP do.

Rates are max-min fair: all grow alike until a port is full; those through it stay, the others grow
on (Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import inf

Ports = Sequence[int]


class SharedPorts:
    """The messages under way, their ports, and their ends unless others begin."""

    def __init__(self) -> None:
        self._now = 0.0
        self._left: dict[int, float] = {}  # seconds that each would take alone
        self._ports: dict[int, Ports] = {}
        self._ends: dict[int, float] = {}

    def next_end(self) -> float:
        """Return the earliest end; infinity without messages."""
        return min(self._ends.values(), default=inf)

    def begin(self, now: float, seconds: Mapping[int, tuple[float, Ports]]) -> None:
        """Begin messages: by number, the seconds that each takes alone, and its ports."""
        self._advance(now)
        for number, (alone, ports) in seconds.items():
            self._left[number], self._ports[number] = alone, ports
        self._share()

    def end(self, now: float) -> list[int]:
        """Remove and return the messages that end by ``now``, which is at most the next end."""
        ended = sorted(number for number, end in self._ends.items() if end <= now)
        self._advance(now)
        for number in ended:
            del self._left[number], self._ports[number], self._ends[number]
        self._share()
        return ended

    def _advance(self, now: float) -> None:
        for number, end in self._ends.items():
            whole = end - self._now
            self._left[number] *= (end - now) / whole if whole > 0 else 0.0
        self._now = now

    def _share(self) -> None:
        for number, rate in fair_rates(self._ports).items():
            self._ends[number] = self._now + self._left[number] / rate


def fair_rates(ports: Mapping[int, Ports]) -> dict[int, float]:
    """Return the share of each message, of 1 a port, by number."""
    rates: dict[int, float] = {}
    free = {port: 1.0 for found in ports.values() for port in found}
    coming = dict(ports)
    while coming:
        users = Counter(port for found in coming.values() for port in found)
        rate, full = min((free[port] / n, port) for port, n in users.items())
        for number in [number for number, found in coming.items() if full in found]:
            rates[number] = rate
            for port in coming.pop(number):
                free[port] -= rate
    return rates

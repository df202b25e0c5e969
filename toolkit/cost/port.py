"""When a port is busy, and when several of them have time for a message."""

from bisect import bisect_right

_KEPT = 256  # stretches of time that are remembered; before them a port counts as busy


class Port:
    """One direction of a rank's link, which carries one message at a time."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._since = 0.0

    def free_from(self, time: float, seconds: float) -> float:
        """The earliest moment, ``time`` or later, from which it is free for so long."""
        time = max(time, self._since)
        if not self._ends or time >= self._ends[-1]:
            return time
        for k in range(bisect_right(self._ends, time), len(self._ends)):
            if time + seconds <= self._starts[k]:
                return time
            time = max(time, self._ends[k])
        return time

    def take(self, start: float, end: float) -> None:
        """It is busy from ``start`` to ``end``, where it was free."""
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        if len(self._ends) > 2 * _KEPT:
            self._since = self._ends[_KEPT - 1]
            del self._starts[:_KEPT], self._ends[:_KEPT]


def reserve(ports: list[Port], ready: float, seconds: float) -> float:
    """The earliest moment, ``ready`` or later, from which all are free for so long: now taken.

    What takes no time needs no port.
    """
    if seconds == 0:
        return ready
    start = ready
    while True:
        free = start
        for port in ports:
            free = port.free_from(free, seconds)
        if free == start:
            break
        start = free
    for port in ports:
        port.take(start, start + seconds)
    return start

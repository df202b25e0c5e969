"""Reserve time on ports that carry one message at a time."""

from bisect import bisect_right

_KEPT = 256  # busy intervals remembered; time before them counts as busy


class Port:
    """One direction of a rank's link, which carries one message at a time."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._since = 0.0

    def free_from(self, time: float, seconds: float) -> float:
        """Return the earliest time, ``time`` or later, with ``seconds`` free."""
        time = max(time, self._since)
        if not self._ends or time >= self._ends[-1]:
            return time
        for k in range(bisect_right(self._ends, time), len(self._ends)):
            if time + seconds <= self._starts[k]:
                return time
            time = max(time, self._ends[k])
        return time

    def take(self, start: float, end: float) -> None:
        """Mark ``start`` to ``end`` as busy; it must be free."""
        at = bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        if len(self._ends) > 2 * _KEPT:
            self._since = self._ends[_KEPT - 1]
            del self._starts[:_KEPT], self._ends[:_KEPT]


def reserve(ports: list[Port], ready: float, seconds: float) -> float:
    """Take the earliest interval from ``ready`` on that is free on all ports; return its start.

    Messages of 0 seconds need no port.
    """
    if seconds == 0:
        return ready
    start, before = ready, None
    while start != before:
        before = start
        for port in ports:
            start = port.free_from(start, seconds)
    for port in ports:
        port.take(start, start + seconds)
    return start

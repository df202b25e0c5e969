"""Parts of gradient sums that have come from other ranks, until the sums are used."""

import threading
from collections import defaultdict
from typing import NamedTuple

from toolkit.runtime.rank import Payload, Rank
from toolkit.schedule import Instruction


class Arrival(NamedTuple):
    """A part of a sum, with the position of its receive in the program, and the receive."""

    position: int
    receive: Instruction
    payload: Payload


class ReceivedSums:
    """The parts of a rank's gradient sums that other ranks have sent.

    Several threads store parts, in the order in which messages end. A sum takes its parts only when
    an instruction uses it, in the order of the program: floating-point sums depend on it.

    Args:
        rank: has the sums.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._lock = threading.Lock()  # of the dictionary
        # By stage and step.
        self._arrivals: defaultdict[tuple, list[Arrival]] = defaultdict(list)

    def store(self, position: int, i: Instruction, payload: Payload) -> None:
        """Keep what the receive ``i``, at ``position`` of the program, has brought."""
        with self._lock:
            self._arrivals[i.stage, i.step].append(Arrival(position, i, payload))

    def parts_for(self, i: Instruction) -> object:
        """Return the parts of the sum that ``i`` uses, to keep their memory alive."""
        with self._lock:
            return self._arrivals.get((i.stage, i.step))

    def add_to_sum(self, i: Instruction) -> None:
        """Add the parts that have come to the sum that ``i`` uses."""
        with self._lock:
            arrivals = self._arrivals.pop((i.stage, i.step), [])
        for arrival in sorted(arrivals, key=lambda arrival: arrival.position):
            self._rank.take(arrival.receive, arrival.payload)

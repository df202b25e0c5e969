"""Parts of gradient sums that have come from other ranks, until the sums are used."""

import threading
from collections import defaultdict

from toolkit.runtime.rank import Payload, Rank
from toolkit.schedule import Instruction


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
        # By stage and step: (position of the receive, the receive, what it brought).
        self._parts: defaultdict[tuple, list[tuple[int, Instruction, Payload]]] = (
            defaultdict(list)
        )

    def store(self, position: int, i: Instruction, part: Payload) -> None:
        """Keep what the receive ``i``, at ``position`` of the program, has brought."""
        with self._lock:
            self._parts[i.stage, i.step].append((position, i, part))

    def parts_for(self, i: Instruction) -> object:
        """Return the parts of the sum that ``i`` uses, to keep their memory alive."""
        with self._lock:
            return self._parts.get((i.stage, i.step))

    def add_to_sum(self, i: Instruction) -> None:
        """Add the parts that have come to the sum that ``i`` uses."""
        with self._lock:
            parts = self._parts.pop((i.stage, i.step), [])
        for _, receive, part in sorted(parts, key=lambda entry: entry[0]):
            self._rank.take(receive, part)

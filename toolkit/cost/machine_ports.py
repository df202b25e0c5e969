"""Numbers of the ports that messages and collectives take."""

from collections.abc import Sequence

from toolkit.cost.event_queue import Ports
from toolkit.cost.hardware import Hardware


class MachinePorts:
    """The ports of n ranks and of their machines; each port has a direction of its own.

    Two ranks a machine. Rank 1 sends to rank 0 by ports 1 and n; to rank 2 by the ports of their
    machines, 2n and 3n + 1::

        0 .. n-1     a rank sends within its machine      2n + machine   it sends to others
        n .. 2n-1    a rank receives within its machine   3n + machine   it receives from others

    Args:
        hardware: the machines.
        n_ranks: ranks of the program.
    """

    def __init__(self, hardware: Hardware, n_ranks: int) -> None:
        self._n_ranks = n_ranks
        self._machines = [hardware.machine(rank) for rank in range(n_ranks)]

    def is_local(self, rank: int, peer: int) -> bool:
        """Whether two ranks are on one machine."""
        return self._machines[rank] == self._machines[peer]

    def of_message(self, rank: int, peer: int) -> Ports:
        """Return the ports of a message from ``rank`` to ``peer``."""
        n = self._n_ranks
        if self.is_local(rank, peer):
            return rank, n + peer
        # Ranks of a machine share its one port to others. Their own ports only lead to each other.
        return 2 * n + self._machines[rank], 3 * n + self._machines[peer]

    def of_collective(self, peers: Sequence[int]) -> Ports:
        """Return both ports of all ranks of a collective, and of their machines if several."""
        n = self._n_ranks
        ports = (*peers, *(n + peer for peer in peers))
        machines = {self._machines[peer] for peer in peers}
        if len(machines) > 1:
            ports += tuple(2 * n + machine for machine in machines)
            ports += tuple(3 * n + machine for machine in machines)
        return ports

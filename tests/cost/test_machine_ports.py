"""Ports of ranks and machines, by their numbers."""

import pytest

from toolkit.cost.hardware import Hardware
from toolkit.cost.machine_ports import MachinePorts

# Ranks 0 and 1, 2 and 3 share machines.
PAIRS = Hardware(
    "pairs", 1.0, 1.0, link_bandwidth=1.0, ranks_per_machine=2, local_bandwidth=9.0
)


@pytest.mark.parametrize(
    ("rank", "peer", "ports"), [(0, 1, (0, 5)), (3, 2, (3, 6)), (1, 2, (8, 13))]
)
def test_a_message_takes_a_port_that_sends_and_one_that_receives(rank, peer, ports):
    assert MachinePorts(PAIRS, 4).of_message(rank, peer) == ports


@pytest.mark.parametrize(
    ("peers", "ports"),
    [((1, 0), (1, 0, 5, 4)), ((1, 2), (1, 2, 5, 6, 8, 9, 12, 13))],
)
def test_a_collective_takes_all_ports_of_its_ranks(peers, ports):
    """And those of their machines, if there are several."""
    assert MachinePorts(PAIRS, 4).of_collective(peers) == ports

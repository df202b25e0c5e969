"""What collectives send and receive, rank by rank."""

import pytest

from toolkit.schedule import Action, Buffer, Instruction
from toolkit.schedule.program import received_of, traffic_of

COLLECTIVES = [Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST]


def collective(action, peers):
    return Instruction(0, action, 0, buffer=Buffer.GRADIENT, peers=peers)


@pytest.mark.parametrize("n", range(2, 18))
@pytest.mark.parametrize("action", COLLECTIVES)
def test_what_is_sent_is_received(action, n):
    i = collective(action, tuple(range(n)))
    sent, received = ([of(i, rank) for rank in range(n)] for of in (traffic_of, received_of))
    for total in (sent, received):
        messages = 2 * (n - 1) * n if action == Action.ALL_REDUCE else n - 1
        assert sum(found.messages for found in total) == messages
    assert sum(found.units for found in sent) == sum(found.units for found in received)


def test_the_root_of_a_tree():
    """Of four it sends to two, the second of which sends on; and the other way round."""
    ranks = (2, 0, 1, 3)
    broadcast, reduction = (collective(a, ranks) for a in (Action.BROADCAST, Action.REDUCE))
    assert [traffic_of(broadcast, rank).messages for rank in ranks] == [2, 1, 0, 0]
    assert [received_of(broadcast, rank).messages for rank in ranks] == [0, 1, 1, 1]
    assert [traffic_of(reduction, rank).messages for rank in ranks] == [0, 1, 1, 1]
    assert [received_of(reduction, rank).messages for rank in ranks] == [2, 1, 0, 0]

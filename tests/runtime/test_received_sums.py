"""Parts of sums that other ranks have sent: each is added once, in the order of the program."""

from types import SimpleNamespace

from toolkit.runtime.received_sums import ReceivedSums
from toolkit.schedule import Action, Buffer, Instruction


def gradient(action, step, peer=1, stage=0):
    return Instruction(0, action, stage, None, step, None, Buffer.GRADIENT, (peer,))


def test_parts_are_added_once_in_the_order_of_the_program():
    """Messages of several ranks, or of several steps, end in any order."""
    additions = []
    rank = SimpleNamespace(take=lambda i, part: additions.append((i.peers, part)))
    sums = ReceivedSums(rank)
    sums.store(7, gradient(Action.RECV, 0, peer=3), "third")
    sums.store(5, gradient(Action.RECV, 1, peer=1), "of the next step")
    sums.store(2, gradient(Action.RECV, 0, peer=1), "first")
    sums.store(4, gradient(Action.RECV, 0, peer=2), "second")
    assert additions == []

    update = gradient(Action.UPDATE, 0)
    sums.add_to_sum(update)
    assert additions == [((1,), "first"), ((2,), "second"), ((3,), "third")]
    sums.add_to_sum(update)
    assert len(additions) == 3

    sums.add_to_sum(gradient(Action.SEND, 1))
    assert additions[3:] == [((1,), "of the next step")]


def test_parts_stay_alive_while_a_device_adds_them():
    sums = ReceivedSums(SimpleNamespace(take=lambda i, part: None))
    update = gradient(Action.UPDATE, 0)
    assert not sums.parts_for(update)
    receive = gradient(Action.RECV, 0)
    sums.store(0, receive, "part")
    parts = sums.parts_for(update)
    sums.add_to_sum(update)
    assert parts == [(0, receive, "part")]

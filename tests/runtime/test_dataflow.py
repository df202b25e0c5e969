"""What of a rank's program can be done next: opening, queues, and who holds up whom."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.strategies import programs, quick
from toolkit.runtime.dataflow import Dataflow, in_background
from toolkit.schedule import Action, Buffer, Instruction, catalog


def op(action=Action.FORWARD, stage=0, tick=0, microbatch=0):
    return Instruction(tick, action, stage, microbatch, 0, 0)


def weights(action, peer, stage=0, version=0, tick=0):
    return Instruction(tick, action, stage, None, None, version, Buffer.WEIGHTS, (peer,))


def activation(action, peer, stage=0, tick=0, microbatch=0):
    return Instruction(tick, action, stage, microbatch, 0, None, Buffer.ACTIVATION, (peer,))


def summed(action, *peers, stage=0, tick=0, step=0):
    return Instruction(tick, action, stage, None, step, None, Buffer.GRADIENT, peers)


def flow_of(*instructions, ordered=False, rank=0):
    return Dataflow(instructions, rank, ordered=ordered)


def begun(flow):
    """All that can begin now."""
    found = []
    while (position := flow.next()) is not None:
        found.append(position)
    return found


def test_in_background():
    free = Instruction(0, Action.FREE, 0, 0, 0, None, Buffer.ACTIVATION)
    kinds = [
        (op(), False),
        (op(Action.BACKWARD_WEIGHT), False),
        (free, False),
        (free._replace(buffer=Buffer.WEIGHTS), True),
        (op(Action.UPDATE), True),
        (weights(Action.SEND, 1), True),
        (activation(Action.RECV, 1), True),
        (summed(Action.ALL_REDUCE, 0, 1), True),
    ]
    assert [in_background(i) for i, _ in kinds] == [expected for _, expected in kinds]


# Opening


def test_nothing_begins_before_it_is_opened():
    flow = flow_of(*(activation(Action.RECV, 1, microbatch=m) for m in range(3)))
    assert flow.next() is None
    flow.open(0)
    assert flow.next() is None
    flow.open(2)
    assert begun(flow) == [0, 1]
    flow.open(1)  # what is open stays so
    assert flow.next() is None
    flow.open(3)
    assert begun(flow) == [2]


def test_opening_by_tick():
    ticks = (0, 1, 1, 3, 4)
    flow = flow_of(*(activation(Action.RECV, 1, tick=t, microbatch=t) for t in ticks))
    flow.open_until(-1)
    assert begun(flow) == []
    flow.open_until(1)
    assert begun(flow) == [0, 1, 2]
    flow.open_until(0)
    flow.open_until(2)
    assert begun(flow) == []
    flow.open_until(99)
    assert begun(flow) == [3, 4]


def test_what_ends_lets_others_begin():
    """Once they are open, too: before, to lack nothing is not enough."""
    flow = flow_of(op(), activation(Action.SEND, 1), op(stage=1), activation(Action.SEND, 1, 1))
    flow.open(2)
    assert flow.next() is None
    flow.end(0)
    assert begun(flow) == [1]
    flow.end(2)
    assert flow.next() is None
    flow.open(4)
    assert begun(flow) == [3]


# Queues


@pytest.mark.parametrize("ordered", [False, True])
def test_collectives_begin_in_order(ordered):
    """Of any kind and group: the second could begin, but waits for the first to have."""
    flow = flow_of(
        op(),
        summed(Action.REDUCE, 0, 1),
        weights(Action.BROADCAST, 2)._replace(stage=7, peers=(2, 0)),
        ordered=ordered,
    )
    flow.open(3)
    assert flow.next() is None
    flow.end(0)
    assert begun(flow) == [1, 2]


def test_receives_begin_in_order_by_sender_kind_and_stage():
    """The second version 0 waits until the first is freed, and version 1 of that sender for it."""
    flow = flow_of(
        weights(Action.RECV, 1),
        Instruction(0, Action.FREE, 0, None, None, 0, Buffer.WEIGHTS),
        weights(Action.RECV, 1),
        weights(Action.RECV, 1, version=1),
        weights(Action.RECV, 2, version=2),
        weights(Action.RECV, 1, stage=1),
        activation(Action.RECV, 1),
    )
    flow.open(7)
    assert begun(flow) == [0, 4, 5, 6]
    flow.end(0)
    assert begun(flow) == [1]
    flow.end(1)
    assert begun(flow) == [2, 3]


def test_in_order_a_sender_has_one_queue():
    flow = flow_of(
        weights(Action.RECV, 1),
        Instruction(0, Action.FREE, 0, None, None, 0, Buffer.WEIGHTS),
        weights(Action.RECV, 1),
        activation(Action.RECV, 1),
        activation(Action.RECV, 2, stage=1),
        ordered=True,
    )
    flow.open(5)
    assert begun(flow) == [0, 4]
    flow.end(0)
    assert begun(flow) == [1]
    flow.end(1)
    assert begun(flow) == [2, 3]


@pytest.mark.parametrize(("ordered", "first"), [(False, [2, 3]), (True, [3])])
def test_sends(ordered, first):
    """In order only where they must be, and then by receiver."""
    flow = flow_of(
        op(),
        activation(Action.SEND, 1),
        weights(Action.SEND, 1, stage=1),
        weights(Action.SEND, 2, stage=1),
        ordered=ordered,
    )
    flow.open(4)
    assert begun(flow) == first
    flow.end(0)
    assert begun(flow) == [p for p in (1, 2, 3) if p not in first]


def test_a_queue_goes_on_only_with_what_is_open():
    flow = flow_of(*(activation(Action.RECV, 1, microbatch=m) for m in range(3)))
    flow.open(1)
    assert begun(flow) == [0]
    flow.end(0)
    assert flow.next() is None
    flow.open(3)
    assert begun(flow) == [1, 2]


# What is left


def test_who_holds_up_whom():
    flow = flow_of(
        activation(Action.RECV, 1),
        op(stage=1),
        op(Action.BACKWARD, stage=1),
        summed(Action.SEND, 1, stage=1),
    )
    assert [flow.held_up_by(p) for p in range(4)] == [0, 0, 0, 0]
    assert not flow.lacks_nothing(1)
    flow.open(4)
    assert begun(flow) == [0]
    assert flow.held_up_by(3) == 0  # under way
    flow.end(0)
    assert flow.lacks_nothing(1)
    assert flow.held_up_by(1) == 1
    assert flow.held_up_by(3) == 1
    flow.end(1)
    assert flow.held_up_by(3) == 2
    flow.end(2)
    assert flow.held_up_by(3) == 3


def test_first_left():
    flow = flow_of(op(), activation(Action.SEND, 1), op(stage=5))
    assert (flow.n_left, flow.first_left()) == (3, 0)
    flow.end(2)
    assert (flow.n_left, flow.first_left()) == (2, 0)
    flow.end(0)
    assert (flow.n_left, flow.first_left()) == (1, 1)
    assert [flow.has_ended(p) for p in range(3)] == [True, False, True]
    flow.end(1)
    assert flow.n_left == 0


# Of any program


@given(programs(), st.integers(0, 10**6), st.booleans(), st.booleans())
@quick
def test_everything_begins_once_and_in_its_queue(program, seed, ordered, far):
    """However far it is opened, and whatever ends first."""
    chance = random.Random(seed)
    for rank, order in enumerate(program.ranks):
        flow = Dataflow(order, rank, ordered=ordered)
        main = [p for p, i in enumerate(order) if not in_background(i)]
        seen, under_way = [], []
        while flow.n_left:
            at = main[0] if main else len(order)
            flow.open(chance.randint(at, len(order)) if far else at)
            for position in begun(flow):
                assert all(flow.has_ended(p) for p in flow.needs[position])
                seen.append(position)
                under_way.append(position)
            ready = [*under_way]
            if main and flow.lacks_nothing(main[0]):
                ready.append(main[0])
            assert ready, "stuck"
            position = chance.choice(ready)
            if position in under_way:
                under_way.remove(position)
            else:
                main.pop(0)
            flow.end(position)
        assert sorted(seen) == [p for p, i in enumerate(order) if in_background(i)]
        for queue in _queues(order, ordered):
            assert [p for p in seen if p in queue] == sorted(queue)


def _queues(order, ordered):
    """The positions that have to begin in order."""
    found = {}
    for position, i in enumerate(order):
        if i.action == Action.RECV:
            key = i.peers if ordered else (i.peers, i.buffer, i.stage)
        elif i.action == Action.SEND and ordered:
            key = ("to", i.peers)
        elif i.action in (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST):
            key = "collectives"
        else:
            continue
        found.setdefault(key, set()).add(position)
    return found.values()


def test_the_first_in_the_program_begins_first():
    """Of all that can begin."""
    program = catalog.cyclic(3, 1).lower(2)
    flow = Dataflow(program.ranks[2], 2, ordered=False)
    flow.open(len(program.ranks[2]))
    found = begun(flow)
    assert found == sorted(found)
    assert len(found) > 1

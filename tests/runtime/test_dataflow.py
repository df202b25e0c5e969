"""Which instructions of a rank's program can begin next: opening, queues, and dependencies."""

import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.meetings import COLLECTIVES
from tests.schedule.strategies import programs, quick
from toolkit.runtime.dataflow import (
    Dataflow,
    channel_of,
    in_background,
    last_op_positions,
)
from toolkit.schedule import Action, Buffer, Instruction, catalog

FREE = Instruction(0, Action.FREE, 0, None, None, 0, Buffer.WEIGHTS)


def op(action=Action.FORWARD, stage=0):
    return Instruction(0, action, stage, 0, 0, 0)


def weights(action, peer, stage=0, version=0):
    return Instruction(0, action, stage, None, None, version, Buffer.WEIGHTS, (peer,))


def activation(action, peer, stage=0, tick=0, microbatch=0):
    return Instruction(
        tick, action, stage, microbatch, 0, None, Buffer.ACTIVATION, (peer,)
    )


def summed(action, *peers, stage=0):
    return Instruction(0, action, stage, None, 0, None, Buffer.GRADIENT, peers)


def flow_of(*instructions, ordered=False, opened=None):
    flow = Dataflow(instructions, 0, ordered=ordered)
    flow.open(len(instructions) if opened is None else opened)
    return flow


def begun(flow):
    """All that can begin now."""
    found = []
    while (position := flow.next()) is not None:
        found.append(position)
    return found


def test_a_difference_of_weights_waits_for_the_one_before():
    """Messages of two ranks: the second is a difference to the first."""
    instructions = (
        weights(Action.RECV, 1, version=1),
        weights(Action.RECV, 2, version=2),
        weights(Action.RECV, 2, stage=1, version=2),
    )
    assert begun(flow_of(*instructions)) == [0, 1, 2]
    flow = Dataflow(
        instructions, 0, ordered=False, chained=(Buffer.GRADIENT, Buffer.WEIGHTS)
    )
    flow.open(3)
    assert begun(flow) == [0, 2]
    flow.end(0)
    assert begun(flow) == [1]


def test_only_messages_of_one_kind_share_a_waiter():
    """An update of a row of devices waits for them, and must not hold up a collective."""
    update = Instruction(0, Action.UPDATE, 0, step=0, version=1)
    apart = [
        update,
        summed(Action.ALL_REDUCE, 0, 1),
        weights(Action.SEND, 1),
        weights(Action.RECV, 1),
        weights(Action.RECV, 2),
        weights(Action.RECV, 1, stage=1),
        activation(Action.RECV, 1),
    ]
    assert len({*map(channel_of, apart)}) == len(apart)
    assert channel_of(weights(Action.RECV, 1, version=1)) == channel_of(
        weights(Action.RECV, 1)
    )


def test_in_background():
    ops = op(), op(Action.BACKWARD_WEIGHT), FREE._replace(buffer=Buffer.ACTIVATION)
    others = (
        *(FREE, op(Action.UPDATE), weights(Action.SEND, 1), activation(Action.RECV, 1)),
        summed(Action.ALL_REDUCE, 0, 1),
    )
    assert [in_background(i) for i in (*ops, *others)] == [False] * 3 + [True] * 5


def test_releases_come_first():
    """Those that can begin; each once."""
    other = FREE._replace(stage=2)
    flow = flow_of(op(), FREE, weights(Action.SEND, 1, stage=1), op(stage=2), other)
    assert flow.next_release() is None
    flow.end(3)
    flow.end(0)
    assert [flow.next_release() for _ in range(3)] == [1, 4, None]
    assert begun(flow) == [2]


def test_opening_by_tick():
    ticks = (0, 1, 1, 3, 4)
    flow = flow_of(
        *(activation(Action.RECV, 1, tick=t, microbatch=t) for t in ticks), opened=0
    )
    found = []
    for tick in (-1, 1, 0, 2, 99):
        flow.open_until(tick)
        found.append(begun(flow))
    assert found == [[], [0, 1, 2], [], [], [3, 4]]


@pytest.mark.parametrize(
    ("ordered", "first"), [(False, [0, 4, 5, 6]), (True, [0, 4])], ids=["tags", "order"]
)
def test_receives_begin_in_order(ordered, first):
    """By sender, kind and stage, or by sender alone. A version comes again after its free."""
    flow = flow_of(
        *(weights(Action.RECV, 1), FREE, weights(Action.RECV, 1)),
        weights(Action.RECV, 1, version=1),
        weights(Action.RECV, 2, version=2),
        weights(Action.RECV, 1, stage=1),
        activation(Action.RECV, 1),
        ordered=ordered,
    )
    assert begun(flow) == first
    flow.end(0)
    assert begun(flow) == [1]
    flow.end(1)
    assert begun(flow) == [p for p in (2, 3, 5, 6) if p not in first]


def test_blocker_of():
    flow = flow_of(
        activation(Action.RECV, 1),
        op(stage=1),
        op(Action.BACKWARD, stage=1),
        summed(Action.SEND, 1, stage=1),
    )
    assert [flow.blocker_of(p) for p in range(4)] == [0, 0, 0, 0]
    assert begun(flow) == [0]
    assert flow.blocker_of(3) == 0  # under way
    for position in range(3):
        assert not flow.lacks_nothing(position + 1)
        flow.end(position)
        assert flow.lacks_nothing(position + 1)
        assert flow.blocker_of(3) == position + 1


# Any program


@given(programs(), st.integers(0, 10**6), st.booleans(), st.booleans())
@quick
def test_everything_begins_once_and_in_its_queue(program, seed, ordered, far):
    """However far it is opened, and whatever ends first."""
    chance = random.Random(seed)
    for rank, order in enumerate(program.ranks):
        flow = Dataflow(order, rank, ordered=ordered)
        main = [p for p, i in enumerate(order) if not in_background(i)]
        seen, under_way, opened = [], [], 0
        while flow.n_left:
            at = main[0] if main else len(order)
            opened = max(opened, chance.randint(at, len(order)) if far else at)
            flow.open(opened)
            for position in begun(flow):
                assert position < opened
                assert all(bool(flow.ended[p]) for p in flow.needs[position])
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
            assert flow.n_left == flow.ended.count(0)
        assert sorted(seen) == [p for p, i in enumerate(order) if in_background(i)]
        for queue in _queues(order, ordered):
            assert [p for p in seen if p in queue] == sorted(queue)


def _queues(order, ordered):
    """The positions that have to begin in order."""
    found = defaultdict(set)
    for position, i in enumerate(order):
        if i.action == Action.RECV:
            found[i.peers if ordered else (i.peers, i.buffer, i.stage)].add(position)
        elif i.action == Action.SEND and ordered:
            found["to", i.peers].add(position)
        elif i.action in COLLECTIVES:
            found["collectives"].add(position)
    return found.values()


def test_the_first_in_the_program_begins_first():
    order = catalog.cyclic(3, 1).lower(2).ranks[2]
    flow = Dataflow(order, 2, ordered=False)
    flow.open(len(order))
    found = begun(flow)
    assert found == sorted(found)
    assert len(found) > 1


def test_updates_wait_for_their_limit():
    """Those of a step, whatever their sums; other instructions do not wait."""
    instructions = [op(Action.UPDATE)._replace(step=step) for step in (0, 1)]
    flow = Dataflow(
        [*instructions, summed(Action.ALL_REDUCE, 0, 1)],
        0,
        ordered=False,
        update_limit=-1,
    )
    flow.open(3)
    assert begun(flow) == [2]
    flow.raise_update_limit(0)
    assert begun(flow) == [0]
    flow.raise_update_limit(1)
    assert begun(flow) == [1]


def test_sums_open_with_what_others_still_need():
    """Up to the last gradient or update of the step; and weights of earlier steps."""
    order = [
        op(),
        weights(Action.SEND, 1, version=1),  # that step 1 reads
        summed(Action.SEND, 1)._replace(step=1),
        weights(Action.SEND, 1, stage=1, version=2),  # that step 2 reads
    ]
    flow = Dataflow(order, 0, ordered=False)
    flow.open_sums(0)
    assert begun(flow) == []
    flow.open_sums(1)
    assert begun(flow) == [1, 2]


def test_the_last_op_of_each_step_by_hand():
    """Whatever of the step follows it: messages, and ops of the next step before it."""
    backward = op(Action.BACKWARD)
    instructions = [
        op(),
        op()._replace(step=1),
        backward,
        summed(Action.SEND, 1),
        backward._replace(step=1),
        FREE,
    ]
    assert last_op_positions(instructions) == {2, 4}

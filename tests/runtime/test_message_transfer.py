"""Messages: their tags and groups, and that they arrive whole, in chunks of any size."""

import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given

from tests.runtime.models import assert_same
from tests.schedule.strategies import programs, quick
from toolkit.runtime import join, launch
from toolkit.runtime.message_layout import Layout, Layouts
from toolkit.runtime.message_transfer import (
    Messages,
    Transfer,
    Turns,
    all_reduce_groups,
    largest_chunk,
    tags,
)
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction


def message(action, stage, buffer, *peers):
    return Instruction(stage % 3, action, stage, None, 0, 0, buffer, peers)


@given(programs())
@quick
def test_both_ends_of_a_message_have_one_tag(program):
    """And no other message from the one rank to the other has it."""
    ends = {Action.SEND: {}, Action.RECV: {}}
    for rank, order in enumerate(program.ranks):
        for i, tag in zip(order, tags(order), strict=True):
            if i.action not in ends:
                assert tag == 0
                continue
            way = (rank, *i.peers) if i.action == Action.SEND else (*i.peers, rank)
            assert tag > 0
            assert (way, tag) not in ends[i.action]
            ends[i.action][way, tag] = i.tick, *i[2:7]
    assert ends[Action.SEND] == ends[Action.RECV]


def test_chunks_suit_the_backend_unless_chosen():
    cases = {
        (None, "gloo", False): 1_000_000,
        (None, "gloo", True): 1_000_000,
        (None, "nccl", False): None,
        (None, "nccl", True): 1_000_000,
        (2.5, "gloo", False): 2_500_000,
        (2.5, "nccl", False): 2_500_000,
        (1e-9, "nccl", True): 1,
    }
    assert {case: largest_chunk(*case[:2], paced=case[2]) for case in cases} == cases


TWO_A_MACHINE = [
    *(("gather", (0, 1)), ("gather", (2, 3))),
    ("between", (0, 2)),
    *(("spread", (0, 1)), ("spread", (2, 3))),
]


@pytest.mark.parametrize(
    ("ranks", "per_machine", "expected"),
    [
        (range(4), 0, [("all", (0, 1, 2, 3))]),
        (range(4), 4, [("all", (0, 1, 2, 3))]),
        (range(3), 1, [("between", (0, 1, 2))]),
        (range(4), 2, TWO_A_MACHINE),
        (
            range(4),
            3,
            [("gather", (0, 1, 2)), ("between", (0, 3)), ("spread", (0, 1, 2))],
        ),
        ((1, 3, 5), 4, [("gather", (1, 3)), ("between", (1, 5)), ("spread", (1, 3))]),
    ],
)
def test_groups_of_an_all_reduce(ranks, per_machine, expected):
    assert all_reduce_groups(ranks, per_machine) == expected


def test_a_message_is_packed_before_another_thread_may_send_it(monkeypatch):
    """The packing runs on the stream of the thread that sends."""
    flat, done, begun = torch.zeros(3, dtype=torch.uint8), [], threading.Event()

    def finish_stream(device):
        begun.wait(0.1)  # time for a pacer that has the message too early to send it
        done.append(device)

    def isend(chunk, peer, *, group, tag):
        begun.set()
        done.append(chunk.nbytes)

    monkeypatch.setattr("toolkit.runtime.message_transfer.finish_stream", finish_stream)
    monkeypatch.setattr("torch.distributed.isend", isend)
    world = SimpleNamespace(
        rank=0,
        message_device=flat.device,
        channel=lambda *ranks: None,
        process=lambda rank: rank,
    )
    packing = SimpleNamespace(pack=lambda i, payload, device: flat)
    with Messages(world, packing, 2, paced=True) as messages:
        messages.send(message(Action.SEND, 0, Buffer.WEIGHTS, 1), {})
        begun.wait(20)
    assert done[:2] == [flat.device, 2]


# Between two processes

SIZES = (0, 1, 5, 8, 9, 23, 0, 240)  # bytes of each stage's message
CHUNKS = (1, 2, 8, 9, 1000, None)  # bytes; None: all at once
MIXED = {"a": (3, torch.float64), "b": (5, torch.float32), "c": (0, torch.float32)}


def layouts():
    """One byte a weight; gradients of several types, as a norm's statistics may be."""
    weights = tuple(Layout.of({"w": torch.empty(n, dtype=torch.uint8)}) for n in SIZES)
    mixed = Layout.of(
        {name: torch.empty(n, dtype=dtype) for name, (n, dtype) in MIXED.items()}
    )
    nothing = Layout.of({})
    return Layouts((nothing,), (nothing,), (0,), (mixed, nothing), weights)


def values(rank, stage):
    return (torch.arange(SIZES[stage]) * 7 + 50 * rank + stage).to(torch.uint8)


def summands(rank):
    return {
        name: torch.arange(n, dtype=dtype) + 10 * rank
        for name, (n, dtype) in MIXED.items()
    }


def exchange():
    """What arrived of each stage's message by how it was sent, and of each collective."""
    world = join(device="cpu")
    world.make_groups([("all", (0, 1))], [])
    ways = itertools.product(CHUNKS, (False, True))
    received = {way: _all_to_all(world, 1 - world.rank, *way) for way in ways}
    actions = (Action.ALL_REDUCE, Action.REDUCE, Action.BROADCAST)
    with Messages(world, layouts(), 8, paced=False) as messages:
        collectives = {
            (action.name, root): _collective(messages, action, root)
            for action, root in itertools.product(actions, (0, 1))
        }
    return received, collectives


def _all_to_all(world, peer, chunk_bytes, paced):
    """Every stage's weights at once; half of the receives come first, in another order."""
    stages = range(len(SIZES))
    sent, coming = [], {}
    with Messages(world, layouts(), chunk_bytes, paced=paced) as messages:
        if paced:
            messages.pacer.rate = 1e5

        def receive(stage):
            i = message(Action.RECV, stage, Buffer.WEIGHTS, peer)
            coming[stage] = i, messages.receive(i, 1 + stage)

        for stage in reversed(stages[::2]):
            receive(stage)
        for stage in stages:
            i = message(Action.SEND, stage, Buffer.WEIGHTS, peer)
            payload = values(world.rank, stage)
            sent.append(messages.send(i, {"w": payload}, 1 + stage))
            sent[-1].begin()
            payload.zero_()  # it may change at once
            assert sent[-1].flat.nbytes == messages.n_bytes(i) == SIZES[stage]
        for stage in reversed(stages[1::2]):
            receive(stage)
        for transfer in (*(transfer for _, transfer in coming.values()), *sent):
            transfer.wait()
        return [messages.received(*coming[stage])["w"] for stage in stages]


def _collective(messages, action, root):
    """The result of a collective, with an empty one under way."""
    rank, peers = messages.world.rank, (root, 1 - root)
    if action == Action.BROADCAST:
        i = message(action, 5, Buffer.WEIGHTS, *peers)
        payload = {"w": values(rank, 5)} if rank == root else None
        empty = i._replace(stage=0), {"w": values(rank, 0)}
    else:
        i = message(action, 0, Buffer.GRADIENT, *peers)
        payload = GradientSum(summands(rank))
        empty = i._replace(stage=1), GradientSum()
    transfer, nothing = messages.collective(i, payload), messages.collective(*empty)
    transfer.wait()
    nothing.wait()
    found = messages.received(i, transfer)
    return found["w"] if action == Action.BROADCAST else found.tensors


@pytest.fixture(scope="module")
def exchanged():
    return launch(exchange, 2)


@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("chunk_bytes", CHUNKS)
def test_messages_arrive_whole(exchanged, chunk_bytes, paced):
    """Empty ones, ones smaller than a chunk, and ones with a rest; each under its own tag."""
    for rank, (received, _) in enumerate(exchanged):
        for stage, found in enumerate(received[chunk_bytes, paced]):
            assert torch.equal(found, values(1 - rank, stage))


@pytest.mark.parametrize("root", [0, 1])
def test_collectives(exchanged, root):
    """Each type has its own sum: at all ranks, or at the root; and the root's weights."""
    total = {name: x + summands(1)[name] for name, x in summands(0).items()}
    for rank, (_, collectives) in enumerate(exchanged):
        for action in ("ALL_REDUCE", "REDUCE") if rank == root else ("ALL_REDUCE",):
            assert_same(collectives[action, root], total, 0, 0)
        assert torch.equal(collectives["BROADCAST", root], values(root, 5))


def test_the_message_needed_first_goes_first():
    turns, message = Turns(), Transfer(torch.empty(0))
    assert turns.add(5, message) == [(5, message)]
    assert turns.add(9, message) == turns.add(7, message) == []  # one at a time
    assert turns.add(3, message) == [(3, message)]  # the receiver may need it before 5
    assert turns.end(5) == []
    assert turns.end(3) == [(7, message)]
    assert turns.end(7) == [(9, message)]
    assert turns.end(9) == []


def test_messages_that_others_order_begin_at_once():
    turns, message = Turns(together=True), Transfer(torch.empty(0))
    assert [turns.add(position, message) for position in (7, 9)] == [
        [(7, message)],
        [(9, message)],
    ]
    assert turns.end(7) == []


def test_a_message_begins_once():
    begun = []
    phases = [lambda name=name: begun.append(name) or [] for name in ("first", "next")]
    transfer = Transfer(torch.empty(0), *phases)
    transfer.begin()
    assert begun == ["first"]
    transfer.wait()
    assert begun == ["first", "next"]

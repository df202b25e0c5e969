"""What a meter counts: the tensors that autograd keeps, once each and as long as it keeps them."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from tests.runtime import conform, models
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.meter import Meter
from toolkit.runtime.rank import Rank
from toolkit.runtime.updater import GradientSum
from toolkit.schedule import Action, Buffer, Instruction, catalog

CPU = torch.device("cpu")
FLOAT = 4


def meter():
    return Meter(0, CPU, 0.0)


def forward(found, function, *inputs, weights=(), buffers=()):
    """``function`` of all of them, watched."""
    named = {str(k): w for k, w in enumerate(weights)}
    with found.activations.watch(named, inputs, [*buffers]):
        return function(*inputs, *weights, *buffers)


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


# Activations


def scaled_tanh(x, w, b):
    return torch.tanh(x @ w) * b


def shared(x):
    y = x.exp()
    return (y * y).sum() + (y.view(2, 3) * y[:3]).sum()


@pytest.mark.parametrize(
    ("function", "inputs", "weights", "buffers", "kept"),
    [
        # Of tanh(x w) b only the hyperbolic tangent counts: the rest is given.
        (scaled_tanh, [torch.ones(2, 3)], [leaf(3, 5)], [torch.ones(5)], 10),
        (scaled_tanh, [leaf(2, 3)], [leaf(3, 5)], [torch.ones(5)], 10),
        # Views.
        (lambda x, w: x.view(4, 3) @ w.t(), [torch.ones(2, 6)], [leaf(5, 3)], [], 0),
        (shared, [leaf(6)], [], [], 6),  # by itself, twice in a product, and in views
    ],
)
def test_what_autograd_keeps_counts_once(function, inputs, weights, buffers, kept):
    found = meter()
    y = forward(found, function, *inputs, weights=weights, buffers=buffers)
    assert found.activations.live_bytes == kept * FLOAT
    y.sum().backward()
    assert found.activations.live_bytes == 0


BIG = torch.ones(100)


@pytest.mark.parametrize(
    ("function", "kept"),
    [
        (lambda x: x * BIG[:6], 100),  # a view counts as all that it keeps alive
        # Nodes that keep their own results.
        (lambda x: torch.tanh(x.exp().sigmoid()), 3 * 6),
    ],
)
def test_a_graph_that_is_dropped_leaves_nothing(function, kept):
    found = meter()
    y = forward(found, function, leaf(6))
    assert found.activations.live_bytes == kept * FLOAT
    del y
    assert found.activations.live_bytes == 0


def test_forwards_add_up_until_their_backwards():
    """In either order, as a schedule has them. What is not watched does not count."""
    found, w = meter(), leaf(3, 5)
    first, second, third = (
        forward(found, lambda x, w: torch.tanh(x @ w), torch.ones(n, 3), weights=[w])
        for n in (1, 2, 4)
    )
    assert found.activations.live_bytes == 7 * 5 * FLOAT
    (second.exp() + second).sum().backward()
    assert found.activations.live_bytes == 5 * 5 * FLOAT
    del third
    assert found.activations.live_bytes == 1 * 5 * FLOAT
    first.sum().backward()
    assert found.activations.live_bytes == 0


@pytest.mark.parametrize(
    "schedule",
    [catalog.cyclic(3), catalog.one_f_one_b(3, 4), catalog.zero_bubble(3, 4)],
)
def test_a_run_leaves_nothing(monkeypatch, schedule):
    """Every rank's forwards, counted by one meter; every instruction's too."""
    found, most = meter(), []
    execute = Rank.execute

    def counted(self, i):
        execute(self, i)
        most.append(found.activations.live_bytes)

    monkeypatch.setattr(Rank, "execute", counted)
    runtime = SingleProcess(
        models.cut(models.residual(), schedule),
        schedule,
        conform.sgd,
        F.cross_entropy,
        "scheduled",
        watching=found.activations.watch,
    )
    list(runtime.run(models.make_batches(schedule.n_microbatches, 2)))
    assert max(most) > 0
    assert found.activations.live_bytes == most[-1] == 0


# Events


def test_events():
    """What an instruction was, when, what it moved, and what the rank holds after it."""
    found, total, kept = meter(), GradientSum(), []
    rank = SimpleNamespace(weights={}, sums={})
    w = leaf(3, 5)

    def receive():
        rank.weights[0, 0] = {"w": w, "b": torch.zeros(5)}
        return 20 * FLOAT

    def compute():
        x = torch.ones(2, 3)
        kept.append(forward(found, lambda x, w: torch.tanh(x @ w), x, weights=[w]))
        return 0

    def go_back():
        kept.pop().sum().backward()
        total.add({"w": w.grad})
        rank.sums[0, 0] = total
        return 0

    def free():
        rank.weights.clear()
        return 0

    steps = {
        Instruction(
            0, Action.RECV, 0, version=0, buffer=Buffer.WEIGHTS, peers=(1,)
        ): receive,
        Instruction(0, Action.FORWARD, 0, 0, 0, 0): compute,
        Instruction(1, Action.BACKWARD, 0, 0, 0, 0): go_back,
        Instruction(2, Action.FREE, 0, version=0, buffer=Buffer.WEIGHTS): free,
    }
    for i, do in steps.items():
        found.perform(rank, i, lambda _, do=do: do())
    events = found.record.events
    assert [event.instruction for event in events] == [*steps]
    assert [event.tick for event in events] == [0, 0, 1, 2]
    # moved, activations, weights, gradients.
    assert [event[4:] for event in events] == [
        *((80, 0, 80, 0), (0, 40, 80, 0)),
        *((0, 0, 80, 60), (0, 0, 0, 60)),
    ]
    times = [time for event in events for time in (event.start, event.end)]
    assert times == sorted(times)


@pytest.mark.parametrize("schedule", [catalog.cyclic(2), catalog.cyclic(3, n_stages=2)])
def test_ticks_go_on_from_program_to_program(schedule):
    """No slot is in two programs."""
    found = meter()
    rank = SimpleNamespace(weights={}, sums={})
    slots = []
    for first_step in (0, 2):
        program = schedule.lower(2, first_step)
        before = len(found.record.events)
        found.begin(rank)
        # In whichever order they end.
        for i in reversed(program.ranks[found.record.rank]):
            found.perform(rank, i, lambda i: 0)
        found.finish(program)
        events = found.record.events[before:]
        assert (
            tuple(event.instruction for event in events)
            == program.ranks[found.record.rank]
        )
        offsets = {event.tick - event.instruction.tick for event in events}
        assert len(offsets) == 1
        slots.append({event.tick // schedule.timing.ticks_per_slot for event in events})
    assert max(slots[0]) < min(slots[1])


def test_of_a_dtensor_its_shard_counts():
    """The wrapper has a storage of the whole tensor's size, and none twice."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from toolkit.model.sharded_work import mesh_without_messages

    found = meter()
    with mesh_without_messages(2) as mesh:
        whole = torch.ones(4, 6)
        shard = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        weight = shard.to_local().clone().requires_grad_()

        def wrapped(x, w):
            y = type(shard).from_local(w, mesh, [Shard(0)])
            return (y.tanh() * y.sigmoid()).redistribute(placements=[Replicate()])

        y = forward(found, wrapped, torch.ones(1), weights=[weight])
        # Both factors of the product, each half of 4 x 6 numbers; not the weight.
        assert found.activations.live_bytes == 2 * 12 * FLOAT
        y.to_local().sum().backward()
        assert found.activations.live_bytes == 0


def test_of_an_optimizer_what_it_keeps_of_weights_counts():
    found = meter()
    weights = [leaf(3), leaf(2, 5)]
    optimizers = []
    for make in (torch.optim.AdamW, torch.optim.SGD):
        optimizers.append(make(weights, lr=0.1))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizers[-1].step()
    assert found.record.optimizer_state is None
    found.note_optimizers([*optimizers, None])
    # Two numbers of each of 13 by AdamW, without its counts of steps.
    assert found.record.optimizer_state == 2 * 13 * FLOAT

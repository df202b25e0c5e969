"""Order "scheduled" holds as many activations at once as the schedule says, and lets all go."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from toolkit.model import partition
from toolkit.runtime import SingleProcess, rank
from toolkit.runtime.rank import Rank
from toolkit.runtime.stage import StageRunner
from toolkit.schedule import Action, catalog


class Kept:
    """What autograd keeps of one tensor; counted while it lives."""

    alive = most = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Kept.alive += 1
        Kept.most = max(Kept.most, Kept.alive)
        weakref.finalize(self, Kept.forget)

    @staticmethod
    def forget():
        Kept.alive -= 1


def a_runtime(schedule, *between):
    """Of alike stages, each a linear layer and what comes ``between``; it sums its outputs."""
    n = schedule.n_stages
    layers = [
        layer
        for _ in range(n)
        for layer in (nn.Linear(4, 4), *(make() for make in between))
    ]
    names = [str(k) for k in range(1 + len(between), len(layers), 1 + len(between))]
    stages = partition(nn.Sequential(*layers), n, torch.zeros(2, 4), names)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    return SingleProcess(stages, schedule, optimizer, lambda x, y: x.sum(), "scheduled")


def most_kept(schedule, steps=3):
    """The most tensors that autograd keeps at once, over some steps."""
    runtime = a_runtime(schedule, nn.Tanh)
    size = 2 * schedule.n_microbatches
    # Inputs that want a gradient make the first stage keep as much as the others.
    batches = [(torch.ones(size, 4, requires_grad=True), torch.zeros(size))] * steps
    Kept.alive = Kept.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        for _ in runtime.run(batches):
            pass
    assert Kept.alive == 0
    return Kept.most


def most_held(schedule):
    """The most stage-activations that all ranks of its program together hold in a slot."""
    return max(map(sum, zip(*schedule.lower(3).activations(), strict=True)))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_as_many_as_the_program_holds(n):
    schedules = [catalog.gpipe(n, 6), catalog.one_f_one_b(n, 6)]
    for placement in ("one", "per_microbatch", "per_stage_and_microbatch"):
        schedules.append(catalog.data_parallel(n, placement))
        schedules += [catalog.cyclic(n, delay, placement) for delay in (1, "freshest")]
    single = most_kept(catalog.gradient_accumulation(n, 1)) / n
    for schedule in schedules:
        assert most_kept(schedule) == single * most_held(schedule), schedule.name


@pytest.mark.parametrize(
    "schedule", [catalog.data_parallel(3, "one"), catalog.zero_bubble(3, 3)]
)
def test_gradients_go_as_soon_as_they_are_used(monkeypatch, schedule):
    """And not only when all ops of the same moment have come to their end."""
    execute, seen = Rank.execute, []

    def checked(self, i):
        execute(self, i)
        if i.action in (Action.BACKWARD, Action.BACKWARD_INPUT):
            seen.append(self.saved[i.stage, i.microbatch, i.step].gradients)

    monkeypatch.setattr(Rank, "execute", checked)
    a_runtime(schedule).step(torch.ones(6, 4), torch.zeros(6))
    assert seen == [()] * 9


@pytest.fixture
def uncollected():
    """Python's collector, which does not see a device's memory, has just run and is off."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_no_rank_outlives_its_program():
    most_kept(catalog.cyclic(2, 1))
    assert not [found for found in gc.get_objects() if type(found) is Rank]


@pytest.mark.usefixtures("uncollected")
def test_outputs_that_were_passed_on_are_let_go(monkeypatch):
    """A stage keeps what its ops have saved, and of its outputs only their place in the graph."""

    def passes_on(sender, i):
        """The receiver has them in memory of its own, as from another process."""
        given = give(sender, i)
        return tuple(x.clone() for x in given) if isinstance(given, tuple) else given

    def forward(runner, *arguments):
        outputs = compute(runner, *arguments)
        if runner.index == 0:
            made.extend(map(weakref.ref, outputs))
        return outputs

    def backward(performer, i):
        if i.stage == 0:
            alive.append([ref() is not None for ref in made])
        start(performer, i)

    made, alive = [], []
    give, compute, start = Rank.give, StageRunner.forward, Rank._backward
    monkeypatch.setattr(Rank, "give", passes_on)
    monkeypatch.setattr(StageRunner, "forward", forward)
    monkeypatch.setitem(rank._METHODS, Action.BACKWARD, backward)
    a_runtime(catalog.gpipe(2, 2)).step(torch.ones(4, 4), torch.zeros(4))
    assert alive == [[False, False], [False, False]]

"""Losses over tokens, of which some do not count, and what each rank trains on them."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from toolkit.model import partition
from toolkit.runtime import Controller, Distributed, SingleProcess, join
from toolkit.runtime.baselines import DDP, FSDP, DelayedAllReduce, TorchPipelining
from toolkit.schedule import Correction, catalog

STEPS = 4
LENGTH, VOCABULARY = 5, 7
IGNORED = -100


def model():
    torch.manual_seed(0)
    layers = [
        nn.Embedding(VOCABULARY, 6),
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, nn.Linear(6, VOCABULARY)).double()


def cut(net, schedule):
    example = torch.zeros(2, LENGTH, dtype=torch.int64)
    names = {1: [], 2: ["3"], 3: ["1", "3"]}[schedule.n_stages]
    return partition(net, schedule.n_stages, example, by=names)


def stage_of(n_stages):
    """The stage of a parameter by its name."""
    begins = {1: [], 2: [3], 3: [1, 3]}[n_stages]
    return lambda name: sum(int(name.split(".")[0]) >= begin for begin in begins)


def make_batches(n_microbatches):
    """Micro-batches of 2 rows. At each step one of them, or its only one, has fewest targets."""
    generator = torch.Generator().manual_seed(3)
    size = (2 * n_microbatches, LENGTH)
    batches = []
    for step in range(STEPS):
        inputs = torch.randint(VOCABULARY, size, generator=generator)
        targets = torch.randint(VOCABULARY, size, generator=generator)
        masked = torch.rand(size, generator=generator) < 0.4
        empty = step % n_microbatches
        if n_microbatches > 1:
            masked[2 * empty : 2 * empty + 2] = True
        batches.append((inputs, targets.masked_fill(masked, IGNORED)))
    return batches


def token_loss(outputs, targets):
    """The sum over tokens that count, and their number."""
    scores, classes = outputs.flatten(0, -2), targets.flatten()
    total = F.cross_entropy(scores, classes, ignore_index=IGNORED, reduction="sum")
    return total, (classes != IGNORED).sum()


def whole_loss(outputs, targets):
    """The same as one mean over a whole batch."""
    return F.cross_entropy(
        outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def schedules(n_ranks):
    if n_ranks == 3:
        yield catalog.data_parallel(3)
        yield catalog.cyclic(3, 1)
        yield catalog.cyclic(3)
        yield catalog.one_f_one_b(3, 4)
    if n_ranks == 2:
        yield catalog.cyclic(2, 1, correction=Correction("compensate", 0.5))
        yield catalog.cyclic(2, state="sharded")
        yield catalog.data_parallel(2, accumulate=2)
        yield catalog.cyclic(2, placement="per_stage")
        yield catalog.gpipe(2, 4)
        yield catalog.zero_bubble(2, 4)


def trained(runtime, n_microbatches, n_steps=STEPS):
    """The weights after all steps, and the losses of the steps."""
    results = list(runtime.run(make_batches(n_microbatches)[:n_steps]))
    state = copy.deepcopy(runtime.module().state_dict())
    sums = torch.stack([result.loss_sum() for result in results])
    total = runtime.total(sums)
    return state, total[:, 0] / total[:, 1]


def by_itself(schedule, order="grouped", n_steps=STEPS, **options):
    stages = cut(model(), schedule)
    runtime = SingleProcess(stages, schedule, sgd, token_loss, order, **options)
    return trained(runtime, schedule.n_microbatches, n_steps)


def on_ranks():
    """What every schedule of as many ranks, and every baseline, makes of the batches."""
    world = join()
    found = [
        trained(
            Distributed(cut(model(), s), s, sgd, token_loss, world=world),
            s.n_microbatches,
        )
        for s in schedules(world.size)
    ]
    baselines = {}
    if world.size == 2:
        for make, schedule in (
            (DDP, catalog.data_parallel(2)),
            (FSDP, catalog.data_parallel(2)),
            (DelayedAllReduce, catalog.cyclic(2, 1)),
            (TorchPipelining, catalog.gpipe(2, 4)),
        ):
            stages = cut(model(), schedule)
            runtime = make(stages, schedule, sgd, token_loss, world=world)
            baselines[make.__name__] = (
                schedule,
                *trained(runtime, schedule.n_microbatches),
            )
    return found, baselines


def by_controller(schedule):
    with Controller(ranks=schedule.n_ranks) as controller:
        batches = make_batches(schedule.n_microbatches)
        results = [
            result.loss
            for result in controller.train(
                cut(model(), schedule), schedule, sgd, token_loss, batches
            )
        ]
        return controller.module().state_dict(), torch.stack(results)


def fails_on_zeros(schedule):
    def loss(outputs, targets):
        assert outputs.any()
        return token_loss(outputs, targets)

    stages = cut(model(), schedule)
    runtime = Distributed(stages, schedule, sgd, loss, world=join())
    return trained(runtime, schedule.n_microbatches)

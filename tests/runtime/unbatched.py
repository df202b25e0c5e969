"""Models in which tensors without the batch cross the cuts: tied weights, and scalars."""

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.models import id_batches
from tests.runtime.reference import sgd
from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.runtime import Distributed, SingleProcess, join
from toolkit.runtime.baselines import DDP, FSDP, DelayedAllReduce, TorchPipelining
from toolkit.schedule import catalog


class Text(nn.Module):
    """An embedding, layers and a head; the embedding's weight is the head's, too, if ``tied``."""

    def __init__(self, tied=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(6, 7)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        return self.head(x.mean(1))


class Exported(Text):
    """Control flow that torch.fx cannot trace."""

    def forward(self, ids):
        if ids.shape[1] != 4:
            raise ValueError
        return super().forward(ids)


class Judged(Text):
    """Computes its loss, from targets among its inputs."""

    def forward(self, ids, targets):
        scores = super().forward(ids)
        return scores, F.cross_entropy(scores, targets)


class OnlyLoss(Judged):
    def forward(self, ids, targets):
        return super().forward(ids, targets)[1]


class Routed(nn.Module):
    """Each layer adds to a loss that balances its gates over the samples of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, ids):
        x = self.embed(ids)
        balance = x.new_zeros(())
        for layer, gate in zip(self.layers, self.gates, strict=True):
            shares = gate(x).softmax(-1)
            balance = balance + shares.mean((0, 1)).square().sum()
            x = x + torch.tanh(layer(x)) * shares[..., :1]
        return {"scores": self.head(x.mean(1)), "balance": balance}


class Early(Routed):
    """The first layer alone makes the scalar; the last stage sums it into the loss."""

    def forward(self, ids):
        x = self.embed(ids)
        shares = self.gates[0](x).softmax(-1)
        balance = shares.mean((0, 1)).square().sum()
        for layer, gate in zip(self.layers, self.gates, strict=True):
            x = x + torch.tanh(layer(x)) * gate(x).softmax(-1)[..., :1]
        scores = self.head(x.mean(1))
        return {"scores": scores, "balance": 2 * balance + scores.square().mean()}


def balanced_loss(outputs, targets):
    return F.cross_entropy(outputs["scores"], targets) + 0.1 * outputs["balance"]


MODELS = {
    "tied": functools.partial(Text, tied=True),
    "tied, exported": functools.partial(Exported, tied=True),
    "tied, dropout": functools.partial(Text, tied=True, dropout=0.3),
    "judged": Judged,
    "judged, tied": functools.partial(Judged, tied=True),
    "only loss": OnlyLoss,
    "routed": Routed,
    "early": Early,
}
LOSSES = {
    "judged": lambda outputs, _: outputs[1],
    "judged, tied": lambda outputs, _: outputs[1],
    "only loss": lambda output, _: output,
    "routed": balanced_loss,
    "early": balanced_loss,
}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def reference_of(name):
    """The same weights in a model for the reference, which takes ids alone; and its loss."""
    model = make(name)
    if isinstance(model, Judged):
        model.__class__ = Text
    return model, balanced_loss if isinstance(model, Routed) else F.cross_entropy


@functools.cache
def _cut_once(name, n_stages):
    ids = torch.zeros(2, 4, dtype=torch.long)
    model = make(name)
    judged = isinstance(model, Judged)
    example = (ids, torch.zeros(2, dtype=torch.long)) if judged else ids
    return partition(model, n_stages, example)


def stages_of(name, n_stages):
    return copy.deepcopy(_cut_once(name, n_stages))


def batches_of(name, n_microbatches, steps=4):
    batches = id_batches(n_microbatches, steps)
    if isinstance(make(name), Judged):
        return [((ids, targets), targets) for ids, targets in batches]
    return batches


def optimizer(parameters):
    return sgd(parameters, None)


def runtime_for(name, schedule, order="grouped", kind=SingleProcess, **options):
    stages = stages_of(name, schedule.n_stages)
    loss = LOSSES.get(name, F.cross_entropy)
    if kind is SingleProcess:
        options["order"] = order
    return kind(stages, schedule, optimizer, loss, **options)


ON_RANKS = {
    "tied": [
        catalog.cyclic(2),
        catalog.one_f_one_b(2, 3),
        catalog.cyclic(2, state="sharded"),
    ],
    "judged, tied": [catalog.cyclic(2), catalog.zero_bubble(2, 2)],
    "early": [catalog.cyclic(2, 1, "per_stage"), catalog.gpipe(2, 2)],
}


BASELINES = {
    "ddp": (DDP, catalog.data_parallel(2, n_stages=3), {}),
    "fsdp": (FSDP, catalog.data_parallel(2, n_stages=3), {"reshard": False}),
    "delayed": (DelayedAllReduce, catalog.cyclic(2, 1, n_stages=3), {}),
    "pipelining": (TorchPipelining, catalog.one_f_one_b(2, 3), {}),
    "zero bubble": (TorchPipelining, catalog.zero_bubble(2, 2), {}),
}


def on_baselines(world):
    """On a rank, by baseline: states of a model with a tied weight."""
    found = {}
    for key, (kind, schedule, options) in BASELINES.items():
        runtime = runtime_for("tied", schedule, kind=kind, world=world, **options)
        list(runtime.run(batches_of("tied", schedule.n_microbatches)))
        state = runtime.state_dict()["model"]
        found[key] = copy.deepcopy(runtime.module().state_dict()), state
    try:
        runtime_for("tied", BASELINES["fsdp"][1], kind=FSDP, world=world)
    except UserError as error:
        found["refused"] = str(error)
    return found


def on_ranks():
    """On each rank, by model and schedule: the model's state, and the runtime's after 2 steps."""
    world = join(2, device="cpu")
    found = on_baselines(world)
    for name, schedules in ON_RANKS.items():
        for schedule in schedules:
            runtime = runtime_for(name, schedule, kind=Distributed, world=world)
            batches = batches_of(name, schedule.n_microbatches)
            list(runtime.run(batches[:2]))
            state = runtime.state_dict()
            list(runtime.run(batches[2:]))
            after = copy.deepcopy(runtime.module().state_dict())
            resumed = runtime_for(name, schedule, kind=Distributed, world=world)
            resumed.load_state_dict(state)
            list(resumed.run(batches[2:]))
            again = copy.deepcopy(resumed.module().state_dict())
            found[name, schedule.name, schedule.state] = after, state, again
    return found

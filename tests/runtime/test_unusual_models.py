"""Models whose weights, norms or values are of a rarer kind follow the reference, too."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.runtime.models import (
    assert_same,
    make_batches,
    name_of,
    runtime_for,
    stage_of,
)
from tests.runtime.reference import sgd, trajectory
from toolkit.schedule import catalog


class Summed(nn.Module):
    """Two weights with one gradient, for which autograd may have one tensor."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Parameter(torch.randn(6, 6) / 3) for _ in range(2)
        )

    def forward(self, x):
        return torch.tanh(F.linear(x, self.first + self.second))


class Added(nn.Module):
    """Two weights whose gradients autograd leaves as views of one tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(36, 6)
        self.first, self.second = (nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, x):
        return self.layer(x) + (self.first.unsqueeze(0) + self.second.unsqueeze(0))


class Folded(nn.Module):
    """Its batch norm sees two halves of each sample, all first ones before all second ones."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(18, 6), nn.BatchNorm1d(6), nn.Tanh())
        self.outer = nn.Linear(12, 3)

    def forward(self, x):
        halves = torch.cat(x.flatten(1).chunk(2, 1))
        return self.outer(torch.cat(self.inner(halves).chunk(2), 1))


class Fourier(nn.Module):
    """Complex numbers cross where it is cut in two."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(36, 8), nn.Linear(8, 3)
        weights = [torch.randn(5, 5, dtype=torch.complex128) for _ in range(12)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        x = torch.fft.rfft(torch.tanh(self.before(x.flatten(1))))
        for weight in self.weights:
            x = x @ weight
        return self.after(torch.fft.irfft(x, n=8))


class Active(nn.BatchNorm1d):
    """Ends in an activation."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        known = self.running_mean, self.running_var
        x = F.batch_norm(
            x, *known, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.leaky_relu(x, 0.1, inplace=True)


class Prototypes(nn.Module):
    """Weights may have as many rows as a micro-batch, and are not part of it."""

    def __init__(self, n):
        super().__init__()
        self.body, self.tail = nn.Linear(36, 5), nn.Linear(5, 5)
        self.prototypes = nn.Parameter(torch.randn(n, 4))
        self.lift = nn.Linear(4, 5)

    def forward(self, x):
        lifted = self.lift(self.prototypes)
        return self.tail(torch.tanh(self.body(x.flatten(1)))) @ lifted.t()


class Biased(nn.Module):
    """A function of a weight, without a batch, that both stages use."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x, bias = x.flatten(1)[:, :6], torch.sin(self.bias)
        for layer in self.layers:
            x = torch.tanh(layer(x) + bias)
        return self.head(x * bias)


MODELS = {
    "biased": Biased,
    "active": lambda: in_row(
        *(
            nn.Linear(36, 8),
            Active(8),
            nn.Linear(8, 8),
            Active(8, affine=False),
            nn.Linear(8, 3),
        )
    ),
    "added": lambda: in_row(
        Added(), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    ),
    "summed": lambda: in_row(nn.Linear(36, 6), Summed(), Summed(), nn.Linear(6, 3)),
    "folded": Folded,
    "fourier": Fourier,
    "three prototypes": lambda: Prototypes(3),
    "four prototypes": lambda: Prototypes(4),
}


def in_row(*layers):
    return nn.Sequential(nn.Flatten(), *layers)


@torch.fx.wrap
def routed(x, always, sometimes):
    """Where values are large another weight takes part."""
    small = not x.is_meta and float(x.detach().abs().max()) < 10
    return x @ (always if small else always + sometimes)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = (
            nn.Parameter(torch.randn(36, 3) / 6) for _ in range(2)
        )

    def forward(self, x):
        return routed(x.flatten(1), self.always, self.sometimes)


def adam(parameters, rate):
    return torch.optim.Adam(parameters, 0.01)


def test_a_weight_that_took_part_once_keeps_its_state():
    """In the last update before it is saved it had no gradient."""
    torch.manual_seed(0)
    model = Routed().double()
    small, large = (
        (scale * x, y)
        for scale, (x, y) in zip((1, 100), make_batches(2, 2), strict=True)
    )
    schedule = catalog.data_parallel(2, n_stages=1)
    first, second = (
        runtime_for(copy.deepcopy(model), schedule, "grouped", adam) for _ in range(2)
    )
    list(first.run([large, small]))
    second.load_state_dict(first.state_dict())
    for runtime in (first, second):
        list(runtime.run([small, large]))
    assert_same(second.module().state_dict(), first.module().state_dict(), 0, 0)


@pytest.mark.parametrize("order", ["grouped", "scheduled"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "schedule",
    [
        catalog.gradient_accumulation(2, 4),
        catalog.cyclic(4, n_stages=2),
        catalog.zero_bubble(2, 4),
    ],
    ids=name_of,
)
def test_unusual_models(schedule, name, order):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    runtime = runtime_for(copy.deepcopy(model), schedule, order)
    n_crossing = 2 if name == "biased" or "prototypes" in name else 1
    assert len(runtime.stages.boundaries[1]) == n_crossing
    stage, batches = stage_of(runtime.stages), make_batches(4, 2)
    expected = trajectory(model, stage, schedule.staleness, batches, sgd)[-1]
    list(runtime.run(batches))
    assert_same(runtime.module().state_dict(), expected)

"""A model that mixes the samples of a batch is found before the first step."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import build, check_independent, independence, partition

ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Net(nn.Module):
    """Two layers around a body."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.body = function if isinstance(function, nn.Module) else Body(function)

    def forward(self, x):
        return self.last(self.body(torch.tanh(self.first(x))))


def centred(x):
    mean = x.mean(0)
    return x - mean


def standardised(x):
    return (x - x.mean(0, keepdim=True)) / (x.std(0, keepdim=True) + 1e-5)


def contrasted(x):
    similar = (x @ x.t()).softmax(1)
    return similar @ x


MIXING = {
    centred: "mean = x.mean(0)",
    standardised: "return (x - x.mean(0, keepdim=True))",
    contrasted: "return similar @ x",
    lambda x: x + x.norm(): "x.norm()",
    lambda x: x.flip(0): None,
    lambda x: F.dropout(x - x.mean(0)): "mean",
    lambda x: torch.bernoulli((x - x.mean(0)).sigmoid()): "mean",
}


@pytest.mark.parametrize("n", [2, 3, 4, 9])
@pytest.mark.parametrize("function", MIXING)
def test_names_the_module_and_the_line(function, n):
    stages = partition(Net(function), 2, torch.zeros(n, 6), check=False)
    example = torch.randn(n, 6, generator=torch.Generator().manual_seed(0))
    line = MIXING[function]
    where = (
        r"body \(Body\) \(test_independence.py line \d+: .*\)" if line else "its output"
    )
    match = f"Net mixes .* in {where}"
    with pytest.raises(UserError, match=match) as raised:
        check_independent(stages, example)
    assert (line or "") in str(raised.value)
    assert "or move this into the loss" in str(raised.value)


def test_mixing_is_found_behind_a_last_layer_of_zeros():
    model = Net(centred)
    nn.init.zeros_(model.last.weight)
    with pytest.raises(UserError, match="body"):
        check_independent(partition(model, 2, ROWS, check=False), ROWS)
    assert not model.last.weight.any()


def halves(x):
    """Put all first halves before all second ones, and back."""
    return torch.cat(torch.tanh(torch.cat(x.chunk(2, 1))).chunk(2), 1)


class Folded(nn.Module):
    """Its batch norm sees two halves of each sample, all first ones before all second ones."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return torch.cat(self.norm(torch.cat(x.chunk(2, 1))).chunk(2), 1)


def turned(x):
    """Put the samples last, and then second."""
    return (
        x.t().reshape(2, 3, -1).transpose(0, 1).reshape(6, -1).tanh().reshape(6, -1).t()
    )


def lstm():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.LSTM(3, 6, 2, dropout=0.5)

        def forward(self, x):
            return self.net(x.view(-1, 2, 3).transpose(0, 1))[0][-1]

    return Recurrent()


SEPARATE = [
    torch.relu,
    nn.BatchNorm1d(6),
    nn.BatchNorm1d(6, track_running_stats=False),
    Folded(),
    nn.Dropout(0.5),
    lambda x: F.dropout(halves(x), training=True),
    lambda x: F.dropout(x, 0.5),
    lambda x: x * x.new_empty(x.shape[0], 1).bernoulli_(0.5),
    lambda x: x + torch.randn_like(x[:1]),
    halves,
    turned,
    lstm(),
    lambda x: F.softmax(x - x.max(), 1),  # the largest of all samples cancels out
    lambda x: x.masked_fill(x < 0, -torch.inf).softmax(1),
]


@pytest.mark.parametrize("body", SEPARATE)
def test_accepts_what_keeps_samples_apart(body):
    model = Net(body)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_independent(partition(model, 2, ROWS), ROWS)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accepts_the_zoo(dtype):
    torch.manual_seed(0)
    example = torch.rand(4, 3, 32, 32, dtype=dtype)
    check_independent(
        partition(build("resnet20", 10, 32).to(dtype), 2, example), example
    )


def test_a_single_sample_or_no_values_are_not_compared():
    check_independent(partition(Net(centred), 2, ROWS, check=False), ROWS[:1])
    with torch.device("meta"):
        model = Net(centred)
    check_independent(partition(model, 2, ROWS.to("meta")), ROWS.to("meta"))


def test_several_inputs():
    class Both(nn.Module):
        def __init__(self, mix):
            super().__init__()
            self.embed, self.head, self.mix = nn.Embedding(9, 6), nn.Linear(6, 3), mix

        def forward(self, x, which):
            return self.head(x * self.mix(self.embed(which)))

    inputs = ROWS, torch.tensor([1, 5, 2, 8])
    check_independent(partition(Both(torch.tanh), 2, inputs), inputs)
    with pytest.raises(UserError, match=r"mean = x.mean\(0\)"):
        check_independent(partition(Both(centred), 2, inputs, check=False), inputs)


# By partition itself, with values of its own


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("function", MIXING)
def test_partition_refuses_a_model_that_mixes_samples(function, n):
    """The example has no values."""
    example = torch.full((n, 6), torch.nan)
    line = MIXING[function]
    where = (
        r"body \(Body\) \(test_independence.py line \d+: .*\)" if line else "its output"
    )
    with pytest.raises(UserError, match=f"Net mixes .* in {where}"):
        partition(Net(function), 2, example)
    partition(Net(function), 2, example, check=False)


@pytest.mark.parametrize("body", SEPARATE)
def test_partition_accepts_what_keeps_samples_apart(body):
    """It leaves buffers, modes and generators as they are."""
    model = Net(body)
    model.first.eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.modules()]
    partition(model, 2, torch.empty(3, 6))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes


def test_partition_refuses_a_list_of_modules_that_mixes_samples():
    parts = [nn.Linear(6, 6), nn.Sequential(Body(centred), nn.Linear(6, 3))]
    with pytest.raises(UserError, match="Chain mixes the samples"):
        partition(parts, 2, torch.empty(3, 6))
    partition(parts, 2, torch.empty(3, 6), check=False)


class Failing(nn.Module):
    """Fails on ids from 3 on, but not on the meta device."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 6)

    def forward(self, ids):
        x = self.embed(ids)
        return x - x.mean(0)


def test_partition_judges_no_model_that_fails_on_the_values():
    with pytest.raises(UserError, match="Failing mixes"):
        partition(Failing(), 1, torch.tensor([[0], [2], [1]]))
    partition(Failing(), 1, torch.full((3, 1), 99))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_partition_draws_values_of_the_examples_type(dtype):
    class Scaled(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.scale, self.function = (
                nn.Parameter(torch.ones(6, dtype=dtype)),
                function,
            )

        def forward(self, x):
            return self.function(x * self.scale)

    with torch.autocast("cpu"):
        partition(Scaled(torch.abs), 1, torch.empty(3, 6, dtype=dtype))
        with pytest.raises(UserError, match="Scaled mixes"):
            partition(Scaled(centred), 1, torch.empty(3, 6, dtype=dtype))


def test_partition_skips_large_models_and_those_without_values():
    with torch.device("meta"):
        partition(Net(centred), 1, torch.empty(3, 6))
    with mock.patch.dict(independence._MOST_FLOPS, cpu=100):
        partition(Net(centred), 1, torch.empty(3, 6))

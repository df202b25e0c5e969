"""The graph of a model does what the model does, or the model is refused."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.trace import draws_at_random, evaluated, in_training, trace

ROWS = torch.randn(4, 6)


class Sized(nn.Module):
    """What GPTs do with their mask, and arguments that the example lacks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale=2.0, bias=None, *rest, flag=False, **others):
        if bias is None and not rest and not flag:
            x = x * scale
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return self.linear(x) @ mask


def test_what_the_example_lacks_has_its_default():
    torch.manual_seed(0)
    model = Sized()
    stages = partition(model, 2, ROWS)
    (received,) = (node for node in stages[0].graph.nodes if node.op == "placeholder")
    assert received.target == "x"
    values = (ROWS,)
    for stage in stages:
        values = stage(*values)
    torch.testing.assert_close(values[0], model(ROWS))


def test_further_inputs_are_inputs():
    class Scaled(nn.Module):
        def forward(self, x, scale=None, *more):
            return x if scale is None else x * scale + sum(more)

    inputs = (ROWS, ROWS + 1, ROWS + 2)
    traced = trace(Scaled(), 3)
    torch.testing.assert_close(traced(*inputs), ROWS * (ROWS + 1) + ROWS + 2)


class Region(nn.Module):
    """A part of its forward in a context that no graph holds."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.frozen, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        with self.context():
            x = self.frozen(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (torch.no_grad, "no_grad"),
        (lambda: torch.autocast("cpu", enabled=False), "autocast"),
    ],
)
def test_rejects_a_context_that_the_graph_would_lose(context, name):
    with pytest.raises(UserError, match=f"Region .*{name}"):
        partition(Region(context), 2, ROWS)


def test_traced_where_no_gradient_is_wanted():
    with torch.no_grad(), torch.autocast("cpu"):
        assert len(partition(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), 2, ROWS)) == 2


def test_modules_in_evaluation_mode_stay_in_it():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    model[1].eval()
    stages = partition(model, 2, ROWS, by=["2"])
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert [evaluated(stage) for stage in stages] == [{"1"}, {"1"}]
    assert not in_training(stages[0].eval()).get_submodule("1").training
    assert in_training(stages[1].eval()).get_submodule("2").training
    whole = partition(model.eval(), 2, ROWS)  # a model that was only tested before
    assert [module.training for module in model.modules()] == [False] * 5
    assert not evaluated(whole[0])
    assert not model.training


class Setting(nn.Module):
    """Its forward sets what it holds, in a way of its own."""

    def __init__(self, forward):
        super().__init__()
        self.set, self.head, self.seen = forward, nn.Linear(6, 3), None
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        return self.head(self.set(self, x))


def counted(model, x):
    model.n = model.n + 1
    return x * model.n


def late(model, x):
    model.n = x.mean(0)
    return x


def carried(model, x):
    seen, model.seen = model.seen, x
    return x if seen is None else x + seen


def paired(model, x):
    x = x if model.seen is None else x + model.seen[0]
    model.seen = (x, [x])
    return x


def fresh(model, x):
    model.seen, model.other = x * 2, {"x": x}
    return model.seen + model.other["x"]


@pytest.mark.parametrize(
    ("forward", "seen", "changed"),
    [
        (counted, None, "n"),
        (late, None, "n"),
        (carried, None, "seen"),
        (carried, ROWS, "seen"),
        (paired, (ROWS,), "seen"),
        (fresh, None, None),
        (fresh, ROWS, None),
    ],
)
def test_what_a_forward_sets_is_refused_where_the_next_one_would_read_it(forward, seen, changed):
    """And the model is left as it was."""
    model = Setting(forward)
    model.seen, buffer = seen, model.n
    if changed:
        with pytest.raises(UserError, match=f"Setting .* {changed} "):
            partition(model, 1, ROWS)
    else:
        (stage,) = partition(model, 1, ROWS)
        torch.testing.assert_close(stage(ROWS)[0], model.head(ROWS * 3))
    assert model.n is buffer
    assert model.seen is seen
    assert not hasattr(model, "other")


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw, self.first, self.last = draw, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.draw(self.first(x)))


def attention(x, p):
    heads = x.view(-1, 2, 1, 3)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=p).flatten(1)


@pytest.mark.parametrize(
    ("draw", "draws"),
    [
        (nn.Dropout(0.3), True),
        (nn.Dropout(0.0), False),
        (nn.Dropout(0.3).eval(), False),
        (nn.RReLU(), True),
        (lambda x: F.gumbel_softmax(x), True),
        (lambda x: x + torch.empty_like(x).uniform_(), True),
        (lambda x: x * torch.multinomial(x.softmax(1), 1), True),
        (lambda x: x + torch.randn_like(x), True),
        (lambda x: attention(x, 0.3), True),
        (lambda x: attention(x, 0.0), False),
        (torch.relu, False),
    ],
)
def test_what_draws_at_random_is_seen(draw, draws):
    stages = partition(Drawing(draw), 3, ROWS, by=["draw", "last"] if _named(draw) else "flops")
    assert any(map(draws_at_random, stages)) == draws


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x + torch.normal(0.0, 1.0, (6,)),
        lambda x: torch.relu(x) if torch.rand(()) < 2 else x,
        lambda x: x * random.random(),
        lambda x: x * float(np.random.rand()),
    ],
)
def test_what_would_be_drawn_once_is_refused(draw):
    """A layer that is left out now and then would be left out for ever, or never."""
    with pytest.raises(UserError, match=r"Drawing .*randn_like"):
        partition(Drawing(draw), 2, ROWS)


def _named(draw):
    return isinstance(draw, nn.Module)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.batch_norm(x, None, None, None, None, True),
        lambda x: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    ],
)
def test_a_batch_norm_that_is_no_module_is_refused(norm):
    """It would take micro-batches that run together for one."""
    with pytest.raises(UserError, match=r"Drawing .*batch_norm"):
        partition(Drawing(norm), 2, ROWS)


def test_a_batch_norm_by_statistics_that_are_given_is_none_of_a_batch():
    zeros, ones = torch.zeros(6), torch.ones(6)
    partition(Drawing(lambda x: F.batch_norm(x, zeros, ones)), 2, ROWS)


def test_recurrent_nets_that_draw_are_seen():
    class Recurrent(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.net, self.head = nn.LSTM(3, 4, 2, batch_first=True, dropout=p), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.net(x)[0][:, -1])

    for p in (0.0, 0.5):
        (stage,) = partition(Recurrent(p), 1, torch.randn(4, 5, 3))
        assert draws_at_random(stage) == (p > 0)

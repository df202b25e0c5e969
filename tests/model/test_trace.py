"""The graph of a model does what the model does, or the model is refused."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.trace import trace
from toolkit.model.traced_stage import (
    draws_at_random,
    evaluated,
    in_training,
    one_by_one,
)

ROWS = torch.randn(4, 6)


class Within(nn.Module):
    """A layer, a function or module, and a layer."""

    def __init__(self, body):
        super().__init__()
        self.body, self.first, self.last = body, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.body(self.first(x)))


class Sized(nn.Module):
    """A mask as GPTs have it, and arguments that the example lacks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.ones(8, 8).tril())
        self.linear = nn.Linear(6, 6)

    def forward(self, x, scale=2.0, bias=None, *rest, flag=False, **others):
        if bias is None and not rest and not flag:
            x = x * scale
        mask = self.mask[: x.shape[1], : x.shape[1]]
        return self.linear(x) @ mask


def test_missing_arguments_have_their_defaults():
    model = Sized()
    stages = partition(model, 2, ROWS)
    (received,) = (node for node in stages[0].graph.nodes if node.op == "placeholder")
    assert received.target == "x"
    torch.testing.assert_close(stages[1](*stages[0](ROWS))[0], model(ROWS))


def test_keys_that_are_no_names():
    class Sum(nn.Module):
        def forward(self, x, more):
            return x + more["a b"] * more[3]

    inputs = {"x": ROWS, "more": {"a b": ROWS + 1, 3: ROWS + 2}}
    traced = trace(Sum(), inputs)
    received = [node.target for node in traced.graph.nodes if node.op == "placeholder"]
    assert received == ["more_3", "more_a_b", "x"]
    torch.testing.assert_close(traced(ROWS + 2, ROWS + 1, ROWS), (Sum()(**inputs),))


def test_further_inputs_are_inputs():
    class Scaled(nn.Module):
        def forward(self, x, scale=None, *more):
            return x if scale is None else x * scale + sum(more)

    inputs = ROWS, ROWS + 1, ROWS + 2
    (found,) = trace(Scaled(), inputs)(*inputs)
    torch.testing.assert_close(found, ROWS * (ROWS + 1) + ROWS + 2)


def test_traced_where_no_gradient_is_wanted():
    with torch.no_grad(), torch.autocast("cpu"):
        assert (
            len(partition(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), 2, ROWS))
            == 2
        )


def test_modules_in_evaluation_mode_stay_in_it():
    model = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6), nn.BatchNorm1d(6), nn.Linear(6, 3)
    )
    model[1].eval()
    stages = partition(model, 2, ROWS, by=["2"])
    assert [module.training for module in model.modules()] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert [evaluated(stage) for stage in stages] == [{"1"}, {"1"}]
    assert not in_training(stages[0].eval()).get_submodule("1").training
    assert in_training(stages[1].eval()).get_submodule("2").training
    whole = partition(model.eval(), 2, ROWS)  # a model that was only tested before
    assert not any(module.training for module in model.modules())
    assert not evaluated(whole[0])


# A forward that sets attributes or buffers


class Setting(nn.Module):
    """Its forward sets what it holds, in a way of its own."""

    def __init__(self, forward):
        super().__init__()
        self.set, self.head, self.seen = forward, nn.Linear(6, 3), None
        self.count, self.log = 0, {"all": []}
        self.register_buffer("n", torch.zeros(1))

    def forward(self, x):
        return self.head(self.set(self, x))


class Around(nn.Module):
    """Another module inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


class Branched(Around):
    """Control flow that torch.fx cannot trace, so that torch.export does."""

    def forward(self, x):
        if x.shape[1] != 6:
            raise ValueError
        return self.inner(x)


def counted(model, x):
    model.n = model.n + 1
    return x * model.n


def carried(model, x):
    seen, model.seen = model.seen, x
    return x if seen is None else x + seen


def paired(model, x):
    x = x if model.seen is None else x + model.seen[0]
    model.seen = (x, [x])
    return x


def noted(model, x):
    """Set before it is read, so that the graph could do without; but the caller reads it."""
    model.seen = x * 2
    return model.seen + x


def added(model, x):
    model.log["all"].append(x.mean())
    return x


def counting(model, x):
    model.count += 1
    return x


def recounting(model, x):
    model.log["n"] = model.log.get("n", 0) + 1
    return x


def sized(model, x):
    model.seen = x.shape[0]
    return x


def removed(model, x):
    if hasattr(model, "count"):
        del model.count
    else:
        model.count = 0
    return x


WRITES = {
    carried: "seen",
    paired: "seen",
    noted: "seen",
    added: "log",
    counting: "count",
    recounting: "log",
    sized: "seen",
    removed: "count",
}


def state_of(model):
    contents = {"all": [*model.log["all"]], "others": {*model.log}}
    return model.seen, model.n, model.count, contents, {*vars(model)}


@pytest.mark.parametrize("exported", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_rejects_a_forward_that_writes_an_attribute(write, exported):
    """The model stays as it was."""
    model = Branched(Setting(write)) if exported else Around(Setting(write))
    before = state_of(model.inner)
    match = f"{type(model).__name__} sets inner.{WRITES[write]} in its forward.*return it .* loop"
    with pytest.raises(UserError, match=match):
        partition(model, 1, ROWS)
    assert state_of(model.inner) == before


@pytest.mark.parametrize("seen", [None, ROWS, (ROWS,)])
def test_rejects_a_forward_that_reads_what_the_last_one_wrote(seen):
    model = Setting(paired if isinstance(seen, tuple) else carried)
    model.seen = seen
    with pytest.raises(UserError, match="Setting sets seen in its forward"):
        partition(model, 1, ROWS)
    assert model.seen is seen


def test_rejects_a_forward_that_replaces_a_buffer():
    model = Setting(counted)
    buffer = model.n
    with pytest.raises(UserError, match="Setting changes n in its forward"):
        partition(model, 1, ROWS)
    assert model.n is buffer


def cached(model, x):
    """Fill a cache in the first forward, from sizes alone."""
    if model.seen is None:
        model.seen = torch.arange(6.0)
        model.log["table"] = [1, 2]
    return x + model.seen


def refilled(model, x):
    model.seen = 2.0
    model.log["table"] = [1, 2]
    return x * model.seen


@pytest.mark.parametrize("write", [cached, refilled])
def test_a_cache_that_the_next_forward_leaves_as_it_is(write):
    model = Around(Setting(write))
    before = state_of(model.inner)
    (stage,) = partition(model, 1, ROWS)
    assert state_of(model.inner) == before
    torch.testing.assert_close(stage(ROWS)[0], model(ROWS))


def test_a_cache_in_a_model_that_is_exported():
    partition(Branched(Setting(refilled)), 1, ROWS)


# Random draws


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
def test_random_draws_are_seen(draw, draws):
    assert any(map(draws_at_random, partition(Within(draw), 2, ROWS))) == draws


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_recurrent_nets_that_draw_are_seen(p):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.head = (
                nn.LSTM(3, 4, 2, batch_first=True, dropout=p),
                nn.Linear(4, 3),
            )

        def forward(self, x):
            return self.head(self.net(x)[0][:, -1])

    (stage,) = partition(Recurrent(), 1, torch.randn(4, 5, 3))
    assert draws_at_random(stage) == (p > 0)


# Refusals


@pytest.mark.parametrize(
    ("body", "name"),
    [
        # Drawn once: a layer that is left out at times would be left out always, or never.
        (lambda x: torch.relu(x) if torch.rand(()) < 2 else x, "randn_like"),
        (lambda x: x * random.random(), "randn_like"),
        (lambda x: x * float(np.random.rand()), "randn_like"),
        # Micro-batches that run together would have common statistics.
        (lambda x: F.batch_norm(x, None, None, training=True), "batch_norm"),
        (lambda x: F.batch_norm(x, None, None, None, None, True), "batch_norm"),
        (
            lambda x: torch.batch_norm(
                x, None, None, None, None, True, 0.1, 1e-5, False
            ),
            "batch_norm",
        ),
    ],
)
def test_rejects_what_the_graph_would_lose(body, name):
    with pytest.raises(UserError, match=f"Within .*{name}"):
        partition(Within(body), 2, ROWS)


class Normalised(nn.Linear):
    """Its weights are normalised, by the function for batches."""

    def forward(self, x):
        weight = F.batch_norm(self.weight[None], None, None, training=True)
        return F.linear(x, weight[0], self.bias)


def test_weights_and_given_statistics_may_normalise():
    zeros, ones = torch.zeros(6), torch.ones(6)
    partition(Within(lambda x: F.batch_norm(x, zeros, ones)), 2, ROWS)
    partition(Within(Normalised(6, 6)), 2, ROWS)


# Batch norms with a forward of their own


class Active(nn.BatchNorm1d):
    """A batch norm with an activation of its own, as timm has them."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        known = self.running_mean, self.running_var
        momentum = 0.1 if self.momentum is None else self.momentum
        x = F.batch_norm(
            x, *known, self.weight, self.bias, self.training, momentum, self.eps
        )
        return torch.relu(x)


class Own(nn.BatchNorm1d):
    def __init__(self, n):
        super().__init__(n, eps=1e-3)


@pytest.mark.parametrize("kind", [Active, Own])
def test_a_batch_norm_of_ones_own_is_a_layer(kind):
    """Trying it draws nothing from the user's generator."""
    model = Within(kind(6))
    before = torch.get_rng_state()
    (stage,) = partition(model, 1, ROWS)
    assert [node.op for node in stage.graph.nodes].count("call_module") == 3
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wide_batch_norm_of_ones_own_is_a_layer():
    """Some of its means are close to 0."""
    model = nn.Sequential(nn.Linear(6, 4000), Active(4000), nn.Linear(4000, 3))
    (stage,) = partition(model, 1, ROWS)
    assert [node.op for node in stage.graph.nodes].count("call_module") == 3


class Reading(nn.BatchNorm1d):
    """Reads the statistics of the batches before."""

    def forward(self, x):
        return super().forward(x) + self.running_mean


class Slow(Active):
    """Updates its running statistics by a momentum of its own."""

    def forward(self, x):
        self.momentum = 0.01
        return super().forward(x)


class Wide(Active):
    """Has a weight that torch's has not."""

    def __init__(self, n):
        super().__init__(n)
        self.slope = nn.Parameter(torch.ones(n))


@pytest.mark.parametrize("kind", [Reading, Slow, Wide])
def test_rejects_a_batch_norm_that_differs_from_torchs(kind):
    with pytest.raises(UserError, match=r"Within.* (in body|control flow)"):
        partition(Within(kind(6)), 1, ROWS)


# Outputs, and stages that run one micro-batch at a time


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2)
        )


@pytest.mark.parametrize(
    "end",
    [lambda x: x.mean(0), lambda x: x.argmax(), lambda x: x[:, None].transpose(0, 1)],
)
def test_rejects_an_output_without_the_batch_first(end):
    class Ends(Net):
        def forward(self, x):
            return end(super().forward(x))

    match = "Ends must return tensors with the batch first, or a floating-point scalar"
    with pytest.raises(UserError, match=match):
        partition(Ends(), 1, ROWS)


def test_answers_may_be_several_rows_a_sample():
    class Rows(Net):
        def forward(self, x):
            return super().forward(x).reshape(-1, 1)

    assert partition(Rows(), 1, ROWS).output.shape == (8, 1)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_scaled_by_the_batch_take_one_micro_batch_at_a_time(kind, scaled):
    model = nn.Sequential(kind(5, 4, scale_grad_by_freq=scaled), nn.Identity())
    ids = torch.zeros(3, 2, dtype=torch.int64)
    assert one_by_one(partition(model, 1, ids)[0]) == scaled

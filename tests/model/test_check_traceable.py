"""What stages would lack, or do otherwise, is refused; what they do alike is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from toolkit.errors import UserError
from toolkit.model import partition
from toolkit.model.trace import one_by_one


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x))


def check(model, example=None):
    return partition(model, 1, torch.empty(3, 4) if example is None else example)


def with_hook(put):
    model = Net()
    put(model)
    return model


HOOKS = {
    r"second\.weight": lambda m: m.second.weight.register_hook(torch.neg),
    r"second\.bias": lambda m: m.second.bias.register_post_accumulate_grad_hook(print),
    "itself": lambda m: m.register_full_backward_pre_hook(print),
    "itself, which": lambda m: m.register_forward_hook(print),
    r"first\.1": lambda m: m.first[1].register_forward_hook(print),
}


@pytest.mark.parametrize("name", HOOKS)
def test_rejects_a_hook_that_would_not_run(name):
    with pytest.raises(UserError, match=name):
        check(with_hook(HOOKS[name]))


def test_hooks_that_run():
    """A layer of torch.nn is called as it is, and hooks before and after are part of its call."""
    called = []

    def put(model):
        model.second.register_full_backward_hook(lambda *_: called.append("backward"))
        model.second.register_forward_hook(lambda *_: called.append("forward"))

    stages = check(with_hook(put))
    (output,) = stages[0](torch.randn(3, 4))
    output.sum().backward()
    assert called[-2:] == ["forward", "backward"]


class Twice(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4, **options)
        self.same = self.norm

    def forward(self, x):
        return self.same(torch.tanh(self.norm(self.layer(x))))


def test_a_batch_norm_that_is_called_twice():
    with pytest.raises(UserError, match="norm"):
        check(Twice())
    check(Twice(track_running_stats=False))
    frozen = Twice()
    frozen.norm.eval()
    check(frozen)


def test_a_batch_norm_whose_weights_are_computed():
    model = Net()
    parametrize.register_parametrization(model.first[1], "weight", nn.Softplus())
    with pytest.raises(UserError, match=r"first\.1"):
        check(model)


class Normalised(nn.Linear):
    """Its weights are, by the function for batches."""

    def forward(self, x):
        weight = F.batch_norm(self.weight[None], None, None, training=True)
        return F.linear(x, weight[0], self.bias)


def test_weights_may_be_normalised():
    check(nn.Sequential(Normalised(4, 4), nn.Linear(4, 2)))


class Active(nn.BatchNorm1d):
    """A batch norm with an end of its own, such as timm has them."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        known = self.running_mean, self.running_var
        momentum = 0.1 if self.momentum is None else self.momentum
        x = F.batch_norm(x, *known, self.weight, self.bias, self.training, momentum, self.eps)
        return torch.relu(x)


def test_a_batch_norm_with_an_end_of_its_own():
    stages = check(nn.Sequential(nn.Linear(4, 4), Active(4), nn.Linear(4, 2)))
    assert [node.op for node in stages[0].graph.nodes].count("call_module") == 3


@pytest.mark.parametrize(
    "end", [lambda x: x.mean(0), lambda x: x.mean(), lambda x: x[:, None].transpose(0, 1)]
)
def test_a_model_whose_output_has_no_batch_first(end):
    class Ends(Net):
        def forward(self, x):
            return end(super().forward(x))

    with pytest.raises(UserError, match="Ends"):
        check(Ends())


def test_answers_may_be_several_rows_a_sample():
    class Rows(Net):
        def forward(self, x):
            return super().forward(x).reshape(-1, 1)

    assert check(Rows()).output.shape == (6, 1)


class Own(nn.BatchNorm1d):
    def __init__(self, n):
        super().__init__(n, eps=1e-3)


def test_a_class_that_sets_options_of_one_of_torchs_is_as_that():
    stages = check(nn.Sequential(nn.Linear(4, 4), Own(4), nn.Linear(4, 2)))
    assert [node.op for node in stages[0].graph.nodes].count("call_module") == 3


class Reading(nn.BatchNorm1d):
    """Reads the statistics of the batches before."""

    def forward(self, x):
        return super().forward(x) + self.running_mean


class Wide(Active):
    """Has a weight that torch's has not."""

    def __init__(self, n):
        super().__init__(n)
        self.slope = nn.Parameter(torch.ones(n))


@pytest.mark.parametrize("kind", [Reading, Wide])
def test_a_batch_norm_of_ones_own_that_is_another(kind):
    with pytest.raises(UserError, match=r"Sequential|in 1"):
        check(nn.Sequential(nn.Linear(4, 4), kind(4)))


def test_trying_a_batch_norm_draws_nothing_of_the_users():
    model = nn.Sequential(nn.Linear(4, 4), Active(4), nn.Linear(4, 2))
    before = torch.get_rng_state()
    check(model)
    assert torch.equal(torch.get_rng_state(), before)


class Counted(nn.Module):
    def __init__(self, kind, scaled):
        super().__init__()
        self.ids = kind(5, 4, scale_grad_by_freq=scaled)

    def forward(self, x):
        return self.ids(x)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_gradients_that_are_scaled_by_the_batch_are_of_one_micro_batch(kind, scaled):
    ids = torch.zeros(3, 2, dtype=torch.int64)
    assert one_by_one(check(Counted(kind, scaled), ids)[0]) == scaled

"""A model whose graph would lose a hook, or merge calls of a batch norm, is refused."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from toolkit.errors import UserError
from toolkit.model import partition

ROWS = torch.randn(4, 6)


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 2)
        )


HOOKS = {
    r"1\.weight": lambda m: m[1].weight.register_hook(torch.neg),
    r"1\.bias": lambda m: m[1].bias.register_post_accumulate_grad_hook(print),
    "itself": lambda m: m.register_full_backward_pre_hook(print),
    "itself, which": lambda m: m.register_forward_hook(print),
    r"0\.1": lambda m: m[0][1].register_forward_hook(print),
    r"norm 0\.1": lambda m: parametrize.register_parametrization(
        m[0][1], "weight", nn.Softplus()
    ),
}


@pytest.mark.parametrize("name", HOOKS)
def test_rejects_a_hook_that_would_not_run(name):
    model = Net()
    HOOKS[name](model)
    with pytest.raises(UserError, match=name):
        partition(model, 1, ROWS)


def test_hooks_that_run():
    """A layer of torch.nn is called as it is, and hooks before and after are part of its call."""
    called, model = [], Net()
    model[1].register_full_backward_hook(lambda *_: called.append("backward"))
    model[1].register_forward_hook(lambda *_: called.append("forward"))
    (output,) = partition(model, 1, ROWS)[0](ROWS)
    output.sum().backward()
    assert called[-2:] == ["forward", "backward"]


def test_a_batch_norm_that_is_called_twice():
    def twice(norm):
        return nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), norm)

    with pytest.raises(UserError, match="batch norm 1"):
        partition(twice(nn.BatchNorm1d(6)), 1, ROWS)
    partition(twice(nn.BatchNorm1d(6, track_running_stats=False)), 1, ROWS)
    frozen = twice(nn.BatchNorm1d(6))
    frozen[1].eval()
    partition(frozen, 1, ROWS)

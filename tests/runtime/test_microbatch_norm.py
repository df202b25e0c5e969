"""Micro-batches are normalised apart, in two ways that agree, by few operations."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.stages import cut
from toolkit.runtime import SingleProcess
from toolkit.runtime.meters.operations import count_operations
from toolkit.runtime.microbatch_norm import MicrobatchNorm, NormGroup
from toolkit.schedule import catalog

N = 3


def normalised(way, norm, x, again=False):
    """The output, its gradients, and the statistics."""
    module = MicrobatchNorm(norm, NormGroup(N, again))
    x = x.clone().requires_grad_()
    y, statistics = getattr(module, way)(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    leaves = [x, *norm.parameters()]
    return y, statistics, *torch.autograd.grad((y * weights).sum(), leaves)


def made(kind, **options):
    torch.manual_seed(0)
    norm = kind(4, **options)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


SHAPES = {
    nn.BatchNorm1d: (N * 5, 4),
    nn.BatchNorm2d: (N * 2, 4, 3, 5),
    nn.BatchNorm3d: (3, 4, 2, 2, 2),
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_both_ways_agree_with_a_norm_of_each(kind, options):
    norm = made(kind, **options).double()
    x = 3 + 2 * torch.randn(SHAPES[kind], dtype=torch.float64)
    in_turn, at_once = (normalised(way, norm, x) for way in ("_in_turn", "_at_once"))
    torch.testing.assert_close(at_once, in_turn, rtol=1e-10, atol=1e-12)
    parts = x.chunk(N)
    expected = [
        F.batch_norm(p, None, None, norm.weight, norm.bias, True, 0.0) for p in parts
    ]
    torch.testing.assert_close(in_turn[0], torch.cat(expected), rtol=1e-12, atol=1e-12)
    if norm.track_running_stats:
        channels = [p.transpose(0, 1).flatten(1) for p in parts]
        found = [sum(c.mean(1) for c in channels), sum(c.var(1) for c in channels)]
        torch.testing.assert_close(in_turn[1], torch.stack(found), rtol=1e-10, atol=0)
    else:
        assert in_turn[1] is at_once[1] is None


def test_sixteen_bits_are_summed_in_more():
    norm = made(nn.BatchNorm2d)
    x = (8 + torch.randn(N * 8, 4, 5, 5)).bfloat16()
    in_turn, at_once = (normalised(way, norm, x) for way in ("_in_turn", "_at_once"))
    assert at_once[0].dtype == in_turn[0].dtype == torch.bfloat16
    torch.testing.assert_close(at_once[0], in_turn[0], rtol=0.01, atol=0.02)
    assert at_once[1].dtype == torch.float32
    torch.testing.assert_close(at_once[1], in_turn[1], rtol=1e-4, atol=1e-4)


def test_one_value_of_a_channel_is_refused_in_both_ways():
    for way in ("_in_turn", "_at_once"):
        with pytest.raises(
            ValueError, match=r"more than 1 value per|one value of a channel"
        ):
            normalised(way, made(nn.BatchNorm1d), torch.randn(N, 4))


def of_a_step(n_norms, n_microbatches):
    """The operations of a training step of as many norms."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(n_norms)), nn.Linear(4, 3))
    schedule = catalog.data_parallel(n_microbatches, n_stages=1)
    stages = cut(model, 1, torch.zeros(2, 4))
    sgd = partial(torch.optim.SGD, lr=0.1, foreach=True)
    runtime = SingleProcess(stages, schedule, sgd, F.cross_entropy, "grouped")
    batch = (
        torch.randn(4 * n_microbatches, 4),
        torch.zeros(4 * n_microbatches, dtype=torch.long),
    )
    runtime.step(*batch)
    return count_operations(lambda: runtime.step(*batch))


def test_a_norm_of_many_microbatches_takes_few_operations():
    """As many for eight as for two, besides torch's own of each."""
    few, many = (of_a_step(5, n) - of_a_step(4, n) for n in (2, 8))
    for name in ("native_batch_norm", "native_batch_norm_backward"):
        assert (few.pop(name), many.pop(name)) == (2, 8)
    assert few == many
    assert many.total() <= 12

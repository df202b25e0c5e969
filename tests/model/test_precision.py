"""Autocast of meta tensors: by hand, and as torch's own casts real ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.model import precision as mixed
from toolkit.model.analysis import node_costs
from toolkit.model.precision import meta_autocast, registered
from toolkit.model.trace import trace

HALF, FLOAT = 2, 4
X = torch.empty(5, 3, device="meta")


def cast(function, *values, on_cpu=False, dtype=torch.bfloat16):
    """The types of what ``function`` makes of meta tensors."""
    with meta_autocast(dtype, on_cpu=on_cpu):
        found = function(*values)
    return [x.dtype for x in (found if isinstance(found, tuple) else (found,))]


def test_a_gpu_normalizes_in_32_bits():
    """The first weight is not kept, since no gradient of the input is wanted."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    first, norm, second = [*node_costs(trace(model, 1), (X,), precision="bf16").values()][1:4]
    assert first.activations == X.numel() * HALF
    assert norm.activations == 5 * 4 * FLOAT + 2 * 5 * FLOAT  # with each row's mean and deviation
    assert second.activations == 5 * 4 * HALF + 4 * 2 * HALF
    dtypes = [cost.output.dtype for cost in (first, norm, second)]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert [cost.forward.in_16_bits for cost in (first, norm, second)] == [True, True, True]


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_nothing_is_cast_in_32_bits(precision):
    model = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1))
    for cost in node_costs(trace(model, 1), (X,), precision=precision).values():
        assert not cost.forward.in_16_bits
        assert not cost.backward.in_16_bits


@pytest.mark.parametrize(
    ("function", "on_gpu", "on_cpu"),
    [
        (lambda x, y: F.linear(x, y), torch.bfloat16, torch.bfloat16),
        (lambda x, y: x @ y.t(), torch.bfloat16, torch.bfloat16),
        (lambda x, y: x.__rmatmul__(y.t()), torch.bfloat16, torch.bfloat16),
        (lambda x, y: (x @ y.t()).softmax(-1), torch.float32, torch.bfloat16),
        (lambda x, y: F.softmax(x @ y.t(), -1), torch.float32, torch.bfloat16),
        (lambda x, y: (x @ y.t()) ** 2, torch.float32, torch.bfloat16),
        (lambda x, y: 2 ** (x @ y.t()), torch.float32, torch.bfloat16),
        (lambda x, y: (x @ y.t()).sum(), torch.float32, torch.bfloat16),
        (lambda x, y: F.normalize(x @ y.t()), torch.float32, torch.bfloat16),
        (lambda x, y: torch.addcmul(x @ x.t(), x @ x.t(), x @ x.t()), *[torch.bfloat16] * 2),
        (lambda x, y: torch.dot(x[0], (x @ x.t() @ x)[0]), torch.float32, None),
        (lambda x, y: torch.cat([x, x @ x.t() @ x]), torch.float32, torch.float32),
        (lambda x, y: torch.cat([x @ x.t(), x @ x.t()]), torch.bfloat16, torch.bfloat16),
        (lambda x, y: F.relu(x @ y.t()), torch.bfloat16, torch.bfloat16),
        (lambda x, y: x + 1, torch.float32, torch.float32),
        (lambda x, y: x.double() @ y.double().t(), torch.float64, torch.float64),
        (lambda x, y: (x.long() + 1).sum(), torch.int64, torch.int64),
    ],
)
def test_which_operations_compute_in_what(function, on_gpu, on_cpu):
    """On the CPU as torch itself has it; what fails there is not asked."""
    assert cast(function, X, X) == [on_gpu]
    if on_cpu is not None:
        assert cast(function, X, X, on_cpu=True) == [on_cpu]
        with torch.autocast("cpu", torch.bfloat16):
            assert function(torch.ones(5, 3), torch.ones(5, 3)).dtype == on_cpu


@pytest.mark.parametrize("on_cpu", [False, True])
def test_what_functions_are_made_of_is_cast(on_cpu):
    """Attention by two products, between which a GPU computes weights in 32 bits."""
    attention = nn.MultiheadAttention(8, 2).to("meta")
    x = torch.empty(3, 2, 8, device="meta")
    weights = torch.bfloat16 if on_cpu else torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        real = nn.MultiheadAttention(8, 2)(*[torch.randn(3, 2, 8)] * 3)
    assert [found.dtype for found in real] == [torch.bfloat16] * 2
    assert cast(attention, x, x, x, on_cpu=on_cpu) == [torch.bfloat16, weights]


def test_nothing_is_cast_afterwards():
    before = F.has_torch_function_unary
    with pytest.raises(ZeroDivisionError):
        cast(lambda x: 1 / 0, X)
    assert F.has_torch_function_unary is before
    assert cast(F.linear, X, X, dtype=torch.float16) == [torch.float16]
    assert cast(F.linear, X, X, dtype=None) == [torch.float32]
    assert F.linear(X, X).dtype == torch.float32


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_names_are_those_that_autocast_knows(on_cpu):
    """Of the installed torch; all that is not named here computes in 32 bits."""
    own = mixed._PRODUCTS_ON_CPU if on_cpu else mixed._PRODUCTS_ON_GPU
    widest = mixed._WIDEST_ON_CPU if on_cpu else mixed._WIDEST_ON_GPU
    named = mixed._CONVOLUTIONS | mixed._PRODUCTS | own | widest
    assert named <= registered("CPU" if on_cpu else "CUDA")
    assert not mixed._WITHIN_CUDNN & registered("CUDA")
    assert len(named) == sum(map(len, (mixed._CONVOLUTIONS, mixed._PRODUCTS, own, widest)))

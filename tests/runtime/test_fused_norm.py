"""Norms of all micro-batches as one operation: values, gradients, formats and traces."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compiling import counted_graphs
from toolkit.runtime import fused_norm
from toolkit.runtime.fused_norm import microbatch_norm

N = 3
SHAPES = [(N * 5, 4), (N * 2, 4, 6), (N * 2, 4, 3, 5), (N, 4, 2, 2, 2)]


def inputs(shape, dtype=torch.float64):
    torch.manual_seed(0)
    x = (2 + 3 * torch.randn(shape)).to(dtype).requires_grad_()
    parameters = [
        torch.randn(4, dtype=torch.float64).requires_grad_() for _ in range(2)
    ]
    return x, *parameters


def expected(x, weight, bias, eps):
    norms = [
        F.batch_norm(part, None, None, weight, bias, True, 0.0, eps)
        for part in x.chunk(N)
    ]
    return torch.cat(norms)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("affine", [(True, True), (False, False)])
def test_equals_a_norm_of_each_microbatch(shape, affine):
    x, *parameters = inputs(shape)
    weight, bias = (
        p if used else None for p, used in zip(parameters, affine, strict=True)
    )
    leaves = [leaf for leaf in (x, weight, bias) if leaf is not None]
    y, statistics, _, _ = microbatch_norm(x, weight, bias, N, 1e-3)
    reference = expected(x, weight, bias, 1e-3)
    torch.testing.assert_close(y, reference, rtol=1e-12, atol=1e-12)
    start = torch.randn_like(y)
    mine = torch.autograd.grad(y, leaves, start)
    theirs = torch.autograd.grad(reference, leaves, start)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    channels = [part.detach().transpose(0, 1).flatten(1) for part in x.chunk(N)]
    sums = torch.stack(
        [sum(c.mean(1) for c in channels), sum(c.var(1) for c in channels)]
    )
    torch.testing.assert_close(statistics, sums, rtol=1e-12, atol=1e-12)


def test_gradients_pass_torchs_own_check():
    x, weight, bias = inputs((N * 2, 4, 2, 2))
    torch.autograd.gradcheck(
        lambda *leaves: microbatch_norm(*leaves, N, 1e-3)[0], (x, weight, bias)
    )


def test_the_operation_is_a_well_formed_custom_operation():
    x, weight, bias = inputs((N * 2, 4, 3, 3))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(microbatch_norm, (x, weight, bias, N, 1e-3), test_utils=tests)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_keeps_the_memory_format(layout):
    x, weight, bias = inputs((N * 2, 4, 3, 5))
    x = x.detach().contiguous(memory_format=layout).requires_grad_()
    y, *_ = microbatch_norm(x, weight, bias, N, 1e-3)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert y.is_contiguous(memory_format=layout)
    assert gradient.is_contiguous(memory_format=layout)
    assert y.shape == x.shape


def test_an_activation_may_overwrite_the_result():
    x, weight, bias = inputs((N * 2, 4, 3, 5))
    y, *_ = microbatch_norm(x, weight, bias, N, 1e-3)
    (mine,) = torch.autograd.grad(nn.ReLU(inplace=True)(y).square().sum(), x)
    (theirs,) = torch.autograd.grad(
        expected(x, weight, bias, 1e-3).relu().square().sum(), x
    )
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_both_formulas_are_compiled_where_torch_can(monkeypatch):
    graphs = counted_graphs(monkeypatch, fullgraph=True)
    monkeypatch.setattr(fused_norm, "can_compile", lambda device: True)
    fused_norm._compiled.cache_clear()
    x, weight, bias = inputs((N * 2, 4, 3, 5))
    for _ in range(2):
        y, *_ = microbatch_norm(x, weight, bias, N, 1e-3)
        y.sum().backward()
    fused_norm._compiled.cache_clear()
    assert len(graphs) == 2


def test_sixteen_bits_are_computed_in_more():
    x, weight, bias = inputs((N * 8, 4, 5, 5), torch.bfloat16)
    weight, bias = weight.detach().float(), bias.detach().float()
    y, statistics, *_ = microbatch_norm(x, weight, bias, N, 1e-3)
    (gradient,) = torch.autograd.grad(y.float().square().sum(), x)
    assert (y.dtype, gradient.dtype, statistics.dtype) == (
        x.dtype,
        x.dtype,
        torch.float32,
    )
    reference = expected(x.detach().float(), weight, bias, 1e-3)
    torch.testing.assert_close(y.float(), reference, rtol=0.01, atol=0.02)


def test_more_shapes_than_torch_compiles_by_default(monkeypatch):
    compile_formula = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **k: compile_formula(f, backend="eager", **k)
    )
    formula = fused_norm._compiled.__wrapped__(fused_norm.forward_formula)
    with torch._dynamo.config.patch(accumulated_recompile_limit=2):
        for size in range(2, 7):
            x = torch.randn(N * size, 4, dtype=torch.float64)
            y, *_ = formula(x, None, None, N, 1e-3)
            torch.testing.assert_close(y, expected(x, None, None, 1e-3))

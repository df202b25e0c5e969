"""Meta tensors compute as on the training device: its autocast, and its fused attention."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.model import precision as mixed
from toolkit.model.node_costs import node_costs
from toolkit.model.precision import as_trained, registered
from toolkit.model.trace import trace

HALF, FLOAT = 2, 4
X = torch.empty(5, 3, device="meta")


def cast(function, *values, device="meta", precision="bf16"):
    """The types of what ``function`` makes of meta tensors."""
    with as_trained(torch.device(device), precision):
        found = function(*values)
    return [x.dtype for x in (found if isinstance(found, tuple) else (found,))]


def test_a_gpu_normalizes_in_32_bits():
    """The first weight is not kept, since no gradient of the input is wanted."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    layers = [*node_costs(trace(model, X), (X,), precision="bf16").values()][1:4]
    assert [cost.activations for cost in layers] == [
        X.numel() * HALF,
        5 * 4 * FLOAT + 2 * 5 * FLOAT,  # with each row's mean and deviation
        5 * 4 * HALF + 4 * 2 * HALF,
    ]
    dtypes = [cost.output.dtype for cost in layers]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]
    assert all(cost.forward.in_16_bits for cost in layers)
    for precision in ("fp32", "tf32"):
        costs = node_costs(trace(model, X), (X,), precision=precision).values()
        assert not any(
            cost.forward.in_16_bits or cost.backward.in_16_bits for cost in costs
        )


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
        (
            lambda x, y: torch.addcmul(x @ x.t(), x @ x.t(), x @ x.t()),
            *[torch.bfloat16] * 2,
        ),
        (lambda x, y: torch.dot(x[0], (x @ x.t() @ x)[0]), torch.float32, None),
        (lambda x, y: torch.cat([x, x @ x.t() @ x]), torch.float32, torch.float32),
        (
            lambda x, y: torch.cat([x @ x.t(), x @ x.t()]),
            torch.bfloat16,
            torch.bfloat16,
        ),
        (lambda x, y: F.relu(x @ y.t()), torch.bfloat16, torch.bfloat16),
        (lambda x, y: x + 1, torch.float32, torch.float32),
        (lambda x, y: x.double() @ y.double().t(), torch.float64, torch.float64),
        (lambda x, y: (x.long() + 1).sum(), torch.int64, torch.int64),
    ],
)
def test_which_operations_compute_in_what(function, on_gpu, on_cpu):
    """On the CPU as torch itself computes; None where torch fails."""
    assert cast(function, X, X) == [on_gpu]
    if on_cpu is not None:
        assert cast(function, X, X, device="cpu") == [on_cpu]
        with torch.autocast("cpu", torch.bfloat16):
            assert function(torch.ones(5, 3), torch.ones(5, 3)).dtype == on_cpu


def test_operations_inside_functions_are_cast():
    """Attention by two products, between which a GPU computes weights in 32 bits."""
    attention = nn.MultiheadAttention(8, 2).to("meta")
    x = torch.empty(3, 2, 8, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        real = nn.MultiheadAttention(8, 2)(*[torch.randn(3, 2, 8)] * 3)
    assert cast(attention, x, x, x, device="cpu") == [found.dtype for found in real]
    assert cast(attention, x, x, x) == [torch.bfloat16, torch.float32]


def test_nothing_is_cast_afterwards():
    before = F.has_torch_function_unary
    with pytest.raises(ZeroDivisionError):
        cast(lambda x: 1 / 0, X)
    assert F.has_torch_function_unary is before
    assert cast(F.linear, X, X, precision="fp16") == [torch.float16]
    assert cast(F.linear, X, X, precision="fp32") == [torch.float32]
    assert F.linear(X, X).dtype == torch.float32


def test_the_names_are_those_that_autocast_knows():
    """In the installed torch; everything that is not named here computes in 32 bits."""
    assert registered("CPU") >= mixed._PRODUCTS | mixed._WIDEST_ON_CPU
    on_gpu = mixed._PRODUCTS | mixed._PRODUCTS_ON_GPU | mixed._WIDEST_ON_GPU
    assert on_gpu <= registered("CUDA")
    assert not mixed._WITHIN_CUDNN & registered("CUDA")


# Attention: what is kept for the backward is what the fused kernels keep


class Heads(nn.Module):
    """Attention by torch's module, or by the function alone."""

    def __init__(self, module, causal=False, mask=None, p=0.0):
        super().__init__()
        self.all = nn.Linear(32, 96)
        self.module = (
            nn.MultiheadAttention(32, 4, p, batch_first=True) if module else None
        )
        self.before = nn.Linear(32, 32)
        self.options = {"attn_mask": mask, "is_causal": causal, "dropout_p": p}

    def forward(self, x):
        if self.module is not None:
            x = self.before(x)
            return self.module(x, x, x, need_weights=False)[0]
        q, k, v = self.all(x).chunk(3, -1)
        parts = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v)]
        found = F.scaled_dot_product_attention(*parts, **self.options)
        return found.transpose(1, 2).flatten(2) * 2


def predicted(model, x):
    return sum(cost.activations for cost in node_costs(trace(model, x), (x,)).values())


def kept(model, x):
    """Bytes that autograd keeps without parameters and ``x``."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = model(x)
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize(
    "options",
    [
        {"module": True},
        {"module": False},
        {"module": False, "causal": True},
        {"module": False, "p": 0.5},
        {"module": True, "p": 0.5},
    ],
    ids=str,
)
def test_attention_on_the_cpu_keeps_what_autograd_keeps(options):
    model, x = Heads(**options), torch.randn(2, 48, 32)
    assert predicted(model, x) == kept(model, x)


class Biased(Heads):
    """A trained bias of each pair of tokens, for which the CPU has no fused attention."""

    def __init__(self):
        super().__init__(False)
        self.bias = nn.Parameter(torch.zeros(4, 48, 48))

    def forward(self, x):
        heads = self.before(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, self.bias) * 2


def test_attention_with_a_trained_bias_keeps_what_autograd_keeps():
    model, x = Biased(), torch.randn(2, 48, 32)
    assert predicted(model, x) == kept(model, x)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_exported_attention_costs_as_much(precision):
    class Exported(Heads):
        def forward(self, x):
            return super().forward(x if x.shape[0] != x.shape[1] else x * 2)

    x = torch.empty(2, 48, 32)
    graphs = trace(Heads(False), x), trace(Exported(False), x)
    assert any("aten" in str(node.target) for node in graphs[1].graph.nodes)
    plain, exported = (
        sum(
            cost.activations
            for cost in node_costs(graph, (x,), precision=precision).values()
        )
        for graph in graphs
    )
    assert exported == plain


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("module", [True, False])
def test_attention_grows_with_the_tokens_and_not_with_their_pairs(device, module):
    of = partial(predicted, Heads(module))
    short, long = (of(torch.empty(2, n, 32, device=device)) for n in (64, 256))
    assert short < long < 4.1 * short


def test_attention_with_a_mask_and_in_halves_and_doubles():
    """GPUs have fused kernels for the first two only."""
    x = torch.empty(2, 48, 32, device="meta")
    mask = torch.ones(48, 48).tril().bool()
    plain, masked = predicted(Heads(False), x), predicted(Heads(False, mask=mask), x)
    assert masked == plain + 48 * 48 * 4
    assert predicted(Heads(False).bfloat16(), x.bfloat16()) < 0.6 * plain
    assert predicted(Heads(False).double(), x.double()) > 2.5 * plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [True, False])
def test_attention_on_a_gpu_keeps_what_autograd_keeps(module, dtype):
    model = Heads(module).to("cuda", dtype)
    x = torch.randn(2, 48, 32, device="cuda", dtype=dtype)
    assert predicted(model, x) == pytest.approx(kept(model, x), rel=0.01)

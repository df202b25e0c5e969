"""What attention keeps is what the fused kernels keep."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from toolkit.model.analysis import node_costs
from toolkit.model.trace import trace


class Heads(nn.Module):
    """Attention by torch's module, or by the function alone."""

    def __init__(self, module, causal=False, mask=None, p=0.0):
        super().__init__()
        self.all = nn.Linear(32, 96)
        self.module = nn.MultiheadAttention(32, 4, p, batch_first=True) if module else None
        self.before = nn.Linear(32, 32)
        self.causal, self.mask, self.p = causal, mask, p

    def forward(self, x):
        if self.module is not None:
            x = self.before(x)
            return self.module(x, x, x, need_weights=False)[0]
        q, k, v = self.all(x).chunk(3, -1)
        parts = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, k, v)]
        found = F.scaled_dot_product_attention(
            *parts, attn_mask=self.mask, is_causal=self.causal, dropout_p=self.p
        )
        return found.transpose(1, 2).flatten(2) * 2


def predicted(model, x):
    return sum(cost.activations for cost in node_costs(trace(model, 1), (x,)).values())


def kept(model, x):
    """Bytes that autograd keeps beside parameters and ``x``."""
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


MASK = torch.ones(48, 48).tril().bool()


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
def test_on_the_cpu_it_is_what_autograd_keeps(options):
    model = Heads(**options)
    x = torch.randn(2, 48, 32)
    assert predicted(model, x) == kept(model, x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("options", [{"module": True}, {"module": False}], ids=str)
def test_grows_with_the_tokens_and_not_with_their_pairs(device, options):
    model = Heads(**options)
    short, long = (predicted(model, torch.empty(2, n, 32, device=device)) for n in (64, 256))
    assert short < long < 4.1 * short


def test_a_mask_and_halves_and_doubles():
    """Which the kernels of GPUs take, and the others."""
    x = torch.empty(2, 48, 32, device="meta")
    plain, masked = predicted(Heads(False), x), predicted(Heads(False, mask=MASK), x)
    assert masked == plain + 48 * 48 * 4
    assert predicted(Heads(False).bfloat16(), x.bfloat16()) < 0.6 * plain
    assert predicted(Heads(False).double(), x.double()) > 2.5 * plain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module", [True, False])
def test_on_a_gpu_it_is_what_autograd_keeps(module, dtype):
    model = Heads(module).to("cuda", dtype)
    x = torch.randn(2, 48, 32, device="cuda", dtype=dtype)
    assert predicted(model, x) == pytest.approx(kept(model, x), rel=0.01)

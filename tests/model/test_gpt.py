"""The decoder: against torch's own layers, and what it must not see."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from tests.schedule.strategies import quick
from toolkit.errors import UserError
from toolkit.model import gpt

SIZES = {"vocabulary": 11, "length": 7, "layers": 3, "width": 12, "heads": 3}
TOKENS = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(0))


def made(**sizes):
    torch.manual_seed(0)
    return gpt(**SIZES | sizes).double()


def as_torch_has_it(model):
    """The same weights in torch's encoder layers, under a causal mask."""
    x = model.embed.tokens(TOKENS) + model.embed.places
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    for k in range(SIZES["layers"]):
        block = getattr(model, f"block_{k}")
        layer = nn.TransformerEncoderLayer(
            SIZES["width"],
            SIZES["heads"],
            4 * SIZES["width"],
            dropout=0.0,
            activation=partial(F.gelu, approximate="tanh"),
            batch_first=True,
            norm_first=True,
        ).double()
        layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias = (
            block.attend.parameters()
        )
        layer.self_attn.out_proj, layer.linear1, layer.linear2 = (
            block.gather, block.widen, block.narrow
        )  # fmt: skip
        layer.norm1, layer.norm2 = block.norm_1, block.norm_2
        x = layer(x, mask)
    return model.head(model.norm(x))


def test_equals_torchs_layers():
    model = made()
    whole = model(TOKENS)
    assert torch.allclose(whole, as_torch_has_it(model), rtol=0, atol=1e-12)
    # Shorter sequences.
    assert torch.allclose(model(TOKENS[:, :4]), whole[:, :4], atol=1e-12)


@given(place=st.integers(0, 6))
@quick
def test_an_answer_sees_the_tokens_up_to_its_place(place):
    model, other = made(), TOKENS.clone()
    other[:, place] = (other[:, place] + 1) % 11
    before, after = model(TOKENS), model(other)
    assert torch.equal(before[:, :place], after[:, :place])
    assert (before[:, place:] - after[:, place:]).abs().amax((0, 2)).min() > 0


def test_the_sizes_of_gpt_2():
    """As published, 124 and 1558 million, and an output of its own."""
    vocabulary, length = 50_257, 1024
    for layers, width, heads, published in (
        (12, 768, 12, 124_439_808),
        (48, 1600, 25, 1557611200),
    ):
        with torch.device("meta"):
            model = gpt(vocabulary, length, layers, width, heads)
        assert (
            sum(p.numel() for p in model.parameters()) == published + vocabulary * width
        )


def test_initial_weights_are_those_of_gpt_2():
    """0.02, and less by the square root of twice the layers where they add to the residual."""
    torch.manual_seed(0)
    for name, weight in gpt(200, 100, layers=8, width=64, heads=4).named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert set(weight.unique().tolist()) == {
                1.0 if name.endswith("weight") else 0.0
            }
        else:
            inner = name.endswith(("gather.weight", "narrow.weight"))
            assert float(weight.detach().std()) == pytest.approx(
                0.02 / (4 if inner else 1), rel=0.08
            ), name


def test_dropout_is_off_in_evaluation():
    model = made(dropout=0.5).eval()
    assert torch.equal(model(TOKENS), made()(TOKENS))


def test_dropout_is_in_its_four_places():
    """After the embedding; in each block within attention, after it, and after the perceptron."""
    model = made(dropout=0.5, layers=1)
    block, calls = model.block_0, []
    block.drop.register_forward_hook(
        lambda module, inputs, output: calls.append(output)
    )
    model(TOKENS)
    assert len(calls) == 2
    for output in calls:
        assert 0.2 < float((output == 0).double().mean()) < 0.8
    block.drop.p = model.embed.drop.p = 0.0
    assert not torch.equal(model(TOKENS), model(TOKENS))
    block.dropout = 0.0
    assert torch.equal(model(TOKENS), model(TOKENS))
    model.embed.drop.p = 0.5
    assert not torch.equal(model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", 5),
        ("layers", 0),
        ("vocabulary", 0),
        ("dropout", -0.5),
        ("dropout", 1.0),
    ],
)
def test_rejects(name, value):
    with pytest.raises(UserError, match=f"{name}.*{value}"):
        made(**{name: value})

"""A decoder-only transformer like GPT-2."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.errors import UserError, whole

_SPREAD = 0.02  # of the initial weights


def gpt(
    vocabulary: int,
    length: int,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a decoder that predicts each token from those before it.

    GPT-2 (Radford et al., 2019) in sizes and initial weights; but the token embedding and the
    output have separate weights, since no cut may separate two uses of one parameter. It maps
    tokens ``[b, length]`` to scores of the next tokens ``[b, length, vocabulary]``.

    Args:
        vocabulary: number of tokens.
        length: longest sequence.
        layers: transformer blocks.
        width: embedding size; a multiple of ``heads``.
        heads: attention heads.
        dropout: share of dropped values, after the embedding and in each block.

    Raises:
        UserError: a size or the dropout is out of range.
    """
    sizes = {"layers": layers, "width": width, "heads": heads}
    for name, size in (sizes | {"vocabulary": vocabulary, "length": length}).items():
        whole(size, f"model.{name}", 1)
    if width % heads:
        raise UserError(
            f"model.width must be a multiple of model.heads={heads}: got {width}"
        )
    if not 0 <= dropout < 1:
        raise UserError(f"model.dropout must be in [0, 1): got {dropout}")
    model = nn.Sequential()
    model.add_module("embed", _Embedding(vocabulary, length, width, dropout))
    for index in range(layers):
        model.add_module(f"block_{index}", _Block(width, heads, dropout))
    model.add_module("norm", nn.LayerNorm(width))
    model.add_module("head", nn.Linear(width, vocabulary, bias=False))
    model.apply(_initialise)
    # Each block adds two terms to the residual stream, 2 * layers in all. With 1/sqrt(2 * layers)
    # of the deviation in each, the variance of their sum does not grow with the depth (GPT-2,
    # section 2.3).
    for name, weight in model.named_parameters():
        if name.endswith(_ONTO_THE_RESIDUAL):
            nn.init.normal_(weight, std=_SPREAD / sqrt(2 * layers))
    return model


class _Embedding(nn.Module):
    def __init__(
        self, vocabulary: int, length: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.places, std=_SPREAD)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.drop(
            self.tokens(tokens) + self.places[: tokens.shape[1]]
        )
        return embedded


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.gather(self._attended(self.norm_1(x))))
        widened = F.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        return x + self.drop(self.narrow(widened))

    def _attended(self, x: Tensor) -> Tensor:
        # From [b, tokens, 3 * width] to [3, b, heads, tokens, width / heads].
        query_key_value = (
            self.attend(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query_key_value[0],
            query_key_value[1],
            query_key_value[2],
            dropout_p=dropout,
            is_causal=True,
        )
        # From [b, heads, tokens, width / heads] back to [b, tokens, width].
        return attended.transpose(1, 2).flatten(2)


def is_block(module: nn.Module) -> bool:
    """Return whether ``module`` is a block of a decoder of :func:`gpt`."""
    return isinstance(module, _Block)


_ONTO_THE_RESIDUAL = ("gather.weight", "narrow.weight")


def _initialise(module: Any) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_SPREAD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)

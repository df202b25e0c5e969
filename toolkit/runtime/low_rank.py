"""Matrices as products of two factors of few columns.

::

    M     [r, c]   a weight's gradient, or its difference to the version before: the first
                   dimension by all others
    Q_0   [c, k]   a fixed draw
    P     [r, k]   orthonormal columns of M Q_0: the column factor
    Q     [c, k]   M^T P: the row factor
    P, Q           the same once more, from Q
    M is read as P Q^T

A message has P and Q in 32 bits. Matrices that this would not make half as small, vectors among
them, travel as they are, in 32 bits. Each rank multiplies for itself: where processors differ,
copies of weights may differ in their last bits, those of a step's small difference.

Source: arXiv 1905.13727, algorithm 1. There workers average P and then Q, and begin with the Q of
the step before. Here each message of a chain is factored by itself, from a fixed start in two
iterations, so that a rank keeps nothing but what its last message lost.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from toolkit.cost.compression import LowRankCode, factor_columns

_ITERATIONS = 2

Matrices = Sequence[tuple[int, int]]
"""Rows and columns of the matrices of a message, one after the other."""


@torch.no_grad()
def factor(numbers: Tensor, matrices: Matrices, code: LowRankCode) -> Tensor:
    """Return the bytes that stand for ``numbers``, ``[code.n_bytes(matrices)]``.

    A matrix with a number that is not finite is read as numbers that are not finite.

    Args:
        numbers: of all matrices, ``[n]``, of a floating-point type.
        matrices: rows and columns of each.
        code: how they are written.
    """
    pieces = [numbers[:0]]  # a message may have no matrix
    n_numbers = [n_rows * n_columns for n_rows, n_columns in matrices]
    for piece, (n_rows, n_columns) in zip(
        numbers.split(n_numbers), matrices, strict=True
    ):
        rank = factor_columns(n_rows, n_columns, code.rank)
        if not rank:
            pieces.append(piece)
            continue
        matrix = piece.view(n_rows, n_columns)
        row_factor = _start(n_columns, rank).to(matrix)
        for _ in range(_ITERATIONS):
            column_factor, _ = torch.linalg.qr(matrix @ row_factor)
            row_factor = matrix.T @ column_factor
        pieces += [column_factor.flatten(), row_factor.flatten()]
    return torch.cat(pieces).to(torch.float32).view(torch.uint8)


@torch.no_grad()
def multiply(
    content: Tensor, matrices: Matrices, code: LowRankCode, dtype: torch.dtype
) -> Tensor:
    """Return the numbers of all matrices, ``[n]``, of the bytes that :func:`factor` returned.

    Args:
        content: ``[code.n_bytes(matrices)]`` bytes.
        matrices: rows and columns of each.
        code: how they were written.
        dtype: type of the numbers.
    """
    # A copy: a view as 32-bit numbers needs an address that 4 divides.
    sent = content.clone().view(torch.float32).to(dtype)
    pieces = [sent[:0]]
    for n_rows, n_columns in matrices:
        rank = factor_columns(n_rows, n_columns, code.rank)
        if not rank:
            piece, sent = sent.tensor_split([n_rows * n_columns])
            pieces.append(piece)
            continue
        ends = [n_rows * rank, (n_rows + n_columns) * rank]
        column_factor, row_factor, sent = sent.tensor_split(ends)
        product = column_factor.view(n_rows, rank) @ row_factor.view(n_columns, rank).T
        pieces.append(product.flatten())
    return torch.cat(pieces)


@lru_cache(maxsize=256)
def _start(n_columns: int, rank: int) -> Tensor:
    """Return a draw that is the same on all ranks and in all steps, ``[n_columns, rank]``."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n_columns, rank, generator=generator, dtype=torch.float64)

"""Which images of a batch are read, where a process reads a part of it only."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from toolkit.errors import UserError

Wanted = Callable[[int], Sequence[int]]
"""The parts of a batch, by its number, that are wanted."""

Rows = Callable[[int, int], Tensor]
"""The rows of a batch, by its number and size, that are read."""


def all_rows(batch: int, size: int) -> Tensor:
    return torch.arange(size)


def rows_of(batch_size: int, n_parts: int, wanted: Wanted) -> Rows:
    """The rows of the ``wanted`` ones of ``n_parts`` equal parts.

    Raises:
        ValueError: a batch cannot be divided.
    """

    def rows(batch: int, size: int) -> Tensor:
        _check(size, n_parts)
        parts = torch.arange(size).view(n_parts, -1)
        return parts[list(wanted(batch))].flatten()

    _check(batch_size, n_parts)
    return rows


def _check(size: int, n_parts: int) -> None:
    if size % n_parts:
        raise UserError(
            f"a batch of {size} samples cannot be divided into {n_parts} micro-batches of equal"
            f" size: make it a multiple of {n_parts}"
        )

"""Batches of a set that is held in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.training.data.sample_set import Batch, Batches

Wanted = Callable[[int], Sequence[int]]
"""The parts of a batch, by its number, that are wanted."""

Rows = Callable[[int, int], Tensor]
"""The rows of a batch, by its number and size, that are read."""


def all_rows(batch: int, size: int) -> Tensor:
    return torch.arange(size)


def rows_of(batch_size: int, n_parts: int, wanted: Wanted) -> Rows:
    """The rows of the ``wanted`` ones of ``n_parts`` equal parts.

    Raises:
        UserError: a batch cannot be divided.
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


class Source(Protocol):
    """Gives samples by number, varied by what is drawn for them."""

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """How each of ``n`` samples is varied, ``[k, n]``; not at all without a generator."""
        ...

    def take(self, chosen: Tensor, drawn: Tensor, device: torch.device) -> Batch:
        """The ``chosen`` samples, varied as ``drawn``; both are on the CPU."""
        ...


@dataclass(frozen=True)
class HeldBatches:
    """Batches of ``source``.

    What is drawn at random is drawn on the CPU, so that every device sees the same samples.

    Attributes:
        order: numbers of the samples.
        generator: of what is drawn; without one, batches are of the test, and the last may be
            smaller.
        first, last: the first batch, and the one before which they end; None: with the samples.
    """

    source: Source
    order: Tensor
    batch_size: int
    device: torch.device
    generator: torch.Generator | None
    rows: Rows = all_rows
    first: int = 0
    last: int | None = None

    def __len__(self) -> int:
        full, rest = divmod(len(self.order), self.batch_size)
        n = full + bool(rest and self.generator is None)
        return (n if self.last is None else min(n, self.last)) - self.first

    def between(self, first: int, last: int) -> Batches:
        """See :class:`Batches`."""
        return replace(self, first=self.first + first, last=self.first + last)

    def __iter__(self) -> Iterator[Batch]:
        generator = None if self.generator is None else self.generator.clone_state()
        batches = self.order.split(self.batch_size)[: self.first + len(self)]
        for k, chosen in enumerate(batches, start=-self.first):
            # Drawn for the whole batch, so that a part of it is varied like the whole.
            drawn = self.source.draw(len(chosen), generator)
            if k < 0:
                continue
            rows = self.rows(k, len(chosen))
            if len(rows):
                yield self.source.take(chosen[rows], drawn[:, rows], self.device)

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.microbatches.Divisible`."""
        return iter(replace(self, rows=rows_of(self.batch_size, n_parts, wanted)))


def shuffled(
    n: int, batch_size: int, seed: int, epoch: int, samples: str
) -> tuple[Tensor, torch.Generator]:
    """The numbers of ``n`` samples in the order of an epoch, and what draws all else in it.

    Raises:
        UserError: they are fewer than a training step takes.
    """
    if batch_size > n:
        raise UserError(
            f"a training step takes {batch_size} {samples} and there are {n}: make batch or"
            " microbatches smaller"
        )
    generator = torch.Generator().manual_seed(hash((seed, epoch)))
    return torch.randperm(n, generator=generator), generator

"""Interface of every set of training and test samples."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from toolkit.model.input_spec import InputSpec

Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """A sized iterable of batches ``(inputs [n, ...], targets [n, ...])``."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...

    def between(self, first: int, last: int) -> "Batches":
        """Return the batches from number ``first`` up to, but without, ``last``."""
        ...


class SampleSet(Protocol):
    """Training and test samples with their answers: images and classes, or tokens and the next."""

    @property
    def form(self) -> InputSpec:
        """Form of a sample and of its answer."""
        ...

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """Return the full batches of one epoch, shuffled and augmented by (seed, epoch).

        Args:
            batch_size: samples of a training step, all micro-batches together.
            seed: seed of the run.
            epoch: number of the epoch, from 0.
            device: device of the batches.
        """
        ...

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        """Return this rank's share: every ``n_ranks``-th test sample, from number ``rank`` on.

        Args:
            batch_size: samples of a batch; the last one may have fewer.
            device: device of the batches.
            rank: number of this rank, from 0.
            n_ranks: number of ranks.
        """
        ...

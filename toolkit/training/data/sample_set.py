"""What every set of training and test samples gives."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from toolkit.model.input_spec import InputSpec

Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """Batches ``(inputs [n, ...], targets [n, ...])``, and how many there are."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...

    def between(self, first: int, last: int) -> "Batches":
        """Of these batches those from number ``first`` on and before ``last``, unchanged."""
        ...


class SampleSet(Protocol):
    """Training and test samples with their answers: images and classes, or tokens and the next."""

    @property
    def form(self) -> InputSpec: ...

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """The batches of one epoch, shuffled and augmented by (seed, epoch); full ones only."""
        ...

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        """Every ``n_ranks``-th test sample from number ``rank`` on."""
        ...

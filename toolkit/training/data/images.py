"""What every image set gives."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]


class Batches(Protocol):
    """Batches ``(inputs [n, channels, size, size], targets [n])``, and how many there are."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...

    def between(self, first: int, last: int) -> "Batches":
        """Of these batches those from number ``first`` on and before ``last``, unchanged."""
        ...


class ImageSet(Protocol):
    """Training and test images with their classes."""

    n_classes: int
    image_size: int
    in_channels: int

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """The batches of one epoch, shuffled and augmented by (seed, epoch); full ones only."""
        ...

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        """Every ``n_ranks``-th test image from number ``rank`` on."""
        ...

"""What every set of training and test samples gives."""

from collections.abc import Iterator
from typing import Protocol

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

from toolkit.cli.build import check_target, look_here
from toolkit.errors import UserError
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


def load(config: DictConfig) -> SampleSet:
    """The set of a group's options.

    Raises:
        UserError: they describe none.
    """
    check_target(config, "data", "toolkit.training.data.digits")
    look_here()
    samples: SampleSet = instantiate(config)
    if not all(hasattr(samples, name) for name in ("form", "train", "test")):
        raise UserError(
            f"data: {config._target_} gives a {type(samples).__name__}, and training takes a set"
            " with form, train() and test(), such as toolkit.training.data.Datasets makes of two of"
            " torch's: conf/README.md has an example"
        )
    return samples

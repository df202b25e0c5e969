"""Two of torch's Datasets, such as torchvision's or one's own, as a set to train and test on."""

from collections.abc import Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.input_spec import Images, InputSpec
from toolkit.training.data.batches import HeldBatches, shuffled
from toolkit.training.data.normalize import send
from toolkit.training.data.sample_set import Batch, Batches

_SEEDS = 2**31


class Datasets:
    """Samples are read one by one in the process that trains, for each batch anew.

    What a Dataset draws from torch's generator of the CPU, as torchvision's transforms do, follows
    from the seed, the epoch and the sample, so that a resumed run sees the same samples.

    Args:
        train, test: Datasets with a length, of pairs: a float tensor
            ``[channels, height, width]`` and the number of a class.
        n_classes: how many there are.
        form: what a sample is, if it is no image.

    Raises:
        UserError: they have no length, or no such samples.
    """

    def __init__(
        self, train: Any, test: Any, n_classes: int, form: InputSpec | None = None
    ) -> None:
        for name, dataset in (("train", train), ("test", test)):
            if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
                raise UserError(
                    f"{name} is a Dataset with a length, whose samples have numbers: got a"
                    f" {type(dataset).__name__}"
                )
        self._train, self._test = _Dataset(train), _Dataset(test)
        self.form = form or _images(train, n_classes)

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        n = len(self._train.samples)
        order, generator = shuffled(n, batch_size, seed, epoch, self.form.samples)
        return HeldBatches(self._train, order, batch_size, device, generator)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        order = torch.arange(len(self._test.samples))[rank::n_ranks]
        return HeldBatches(self._test, order, batch_size, device, None)


def _images(dataset: Any, n_classes: int) -> Images:
    sample = dataset[0]
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    if not pair or not isinstance(sample[0], Tensor) or sample[0].dim() != 3:
        raise UserError(
            "samples are pairs of a tensor [channels, height, width] and the number of a class:"
            f" the first one is {_told(sample)}; give form= if they are no images"
        )
    channels, height, width = sample[0].shape
    return Images(channels, height, width, n_classes)


def _told(sample: Any) -> str:
    if isinstance(sample, tuple | list):
        return f"({', '.join(map(_told, sample))})"
    shape = f" {list(sample.shape)}" if isinstance(sample, Tensor) else ""
    return f"a {type(sample).__name__}{shape}"


@dataclass(frozen=True)
class _Dataset:
    """A :class:`toolkit.training.data.batches.Source`."""

    samples: Any

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """A seed a sample, ``[1, n]``; the same for each in the test."""
        if generator is None:
            return torch.zeros(1, n, dtype=torch.long)
        return torch.randint(_SEEDS, (1, n), generator=generator)

    def take(self, chosen: Tensor, drawn: Tensor, device: torch.device) -> Batch:
        pairs = [
            self._read(*which) for which in zip(chosen.tolist(), drawn[0].tolist(), strict=True)
        ]
        inputs, targets = zip(*pairs, strict=True)
        return send(torch.stack(inputs), device), send(torch.stack(targets), device)

    def _read(self, number: int, seed: int) -> Batch:
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            inputs, target = self.samples[number]
        return inputs, torch.as_tensor(target)

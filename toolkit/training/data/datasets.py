"""Two torch Datasets, such as torchvision's or the user's own, as a set to train and test on."""

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.input_spec import Images, InputSpec
from toolkit.training.data.batches import Source, SourceSet, send
from toolkit.training.data.sample_set import Batch

T = TypeVar("T")


class Datasets(SourceSet):
    """Samples that the training process reads one by one, in each epoch anew.

    What a Dataset draws from torch's CPU generator, as torchvision's transforms do, follows from
    the seed, the epoch and the sample, so a resumed run sees the same samples.

    Args:
        train, test: Datasets with a length, of pairs: a float tensor ``[channels, height, width]``
            and the number of a class.
        n_classes: number of classes.
        form: what a sample is; needed unless samples are images.

    Raises:
        UserError: a Dataset has no length, or its samples are not such pairs.
    """

    def __init__(
        self, train: Any, test: Any, n_classes: int, form: InputSpec | None = None
    ) -> None:
        for name, dataset in (("train", train), ("test", test)):
            if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
                raise UserError(
                    f"{name}: got a {type(dataset).__name__}; expected a Dataset with a length and"
                    " numbered samples"
                )
        super().__init__(_Samples(train), _Samples(test), form or _images(train[0], n_classes))


def _images(sample: Any, n_classes: int) -> Images:
    pair = isinstance(sample, tuple | list) and len(sample) == 2
    if not pair or not isinstance(sample[0], Tensor) or sample[0].dim() != 3:
        parts = sample if isinstance(sample, tuple | list) else (sample,)
        found = [f"{type(x).__name__} {list(getattr(x, 'shape', ''))}" for x in parts]
        raise UserError(
            f"the first sample is ({', '.join(found)}); expected a pair of a tensor [channels,"
            " height, width] and the number of a class; give form= unless samples are images"
        )
    channels, height, width = sample[0].shape
    return Images(channels, height, width, n_classes)


@dataclass(frozen=True)
class _Samples(Source):
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return a seed for each sample, ``[1, n]``; zeros for the test."""
        if generator is None:
            return torch.zeros(1, n, dtype=torch.long)
        return torch.randint(2**31, (1, n), generator=generator)

    def read(
        self, batches: Iterable[tuple[Tensor, Tensor]], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        for chosen, (seeds,) in batches:
            numbers = zip(chosen.tolist(), seeds.tolist(), strict=True)
            pairs = [seeded(s, self.dataset.__getitem__, k) for k, s in numbers]
            inputs = torch.stack([x for x, _ in pairs])
            targets = torch.stack([torch.as_tensor(y) for _, y in pairs])
            yield send(inputs, device), send(targets, device)


def seeded(seed: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, drawn by ``seed``; torch's generator stays unchanged."""
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return function(*arguments)

"""Batches of samples: a function of the seed, the epoch and the position, whoever reads them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.input_spec import InputSpec
from toolkit.training.data.sample_set import Batch, Batches

Wanted = Callable[[int], Sequence[int]]
"""A function from a batch's number to the parts of that batch to read."""


class Source(ABC):
    """Samples by number, varied by random numbers that are drawn for a whole batch."""

    @abstractmethod
    def __len__(self) -> int: ...

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return random numbers ``[k, n]`` for ``n`` samples; constants without a generator."""
        return torch.empty(0, n, dtype=torch.long)

    @abstractmethod
    def read(
        self, batches: Iterable[tuple[Tensor, Tensor]], seed: int, device: torch.device
    ) -> Iterator[Batch]:
        """Yield batches on ``device``.

        Args:
            batches: sample numbers ``[n]`` and random numbers ``[k, n]`` of each, on the CPU.
            seed: seed of the epoch.
            device: device of the batches.
        """


@dataclass(frozen=True)
class EpochBatches:
    """The batches of one epoch, or of the test.

    Random numbers are drawn on the CPU, so every device sees the same samples.

    Attributes:
        source: the samples.
        order: numbers of the samples, ``[n]``.
        batch_size: samples of a batch.
        device: device of the batches.
        generator: state with which augmentation begins. None for the test, whose last batch may
            be smaller.
        seed: seed of the epoch.
        n_parts, wanted: equal parts of a batch, and those to read of each.
        first, last: the range of batches.
    """

    source: Source
    order: Tensor
    batch_size: int
    device: torch.device
    generator: torch.Generator | None = None
    seed: int = 0
    n_parts: int = 1
    wanted: Wanted = lambda batch: (0,)
    first: int = 0
    last: int | None = None

    def __len__(self) -> int:
        return len(self._numbers())

    def _numbers(self) -> range:
        full, rest = divmod(len(self.order), self.batch_size)
        return range(full + (rest > 0 and self.generator is None))[self.first : self.last]

    def between(self, first: int, last: int) -> Batches:
        """See :class:`Batches`."""
        numbers = self._numbers()[first:last]
        return replace(self, first=numbers.start, last=numbers.stop)

    def parts(self, n_parts: int, wanted: Wanted) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.microbatches.Divisible`."""
        if self.batch_size % n_parts:
            raise UserError(
                f"a batch of {self.batch_size} samples cannot be divided into {n_parts}"
                f" micro-batches of equal size: make it a multiple of {n_parts}"
            )
        return iter(replace(self, n_parts=n_parts, wanted=wanted))

    def __iter__(self) -> Iterator[Batch]:
        return self.source.read(self._drawn(), self.seed, self.device)

    def _drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = None if self.generator is None else self.generator.clone_state()
        span = self._numbers()
        batches = self.order.split(self.batch_size)[: span.stop]
        for k, chosen in enumerate(batches, start=-span.start):
            # Drawn for every whole batch from the first on: a part, or a range of batches, then
            # has the random numbers that it has within the whole.
            drawn = self.source.draw(len(chosen), generator)
            if k >= 0 and (parts := [*self.wanted(k)]):
                rows = torch.arange(len(chosen)).view(self.n_parts, -1)[parts].flatten()
                yield chosen[rows], drawn[:, rows]


class SourceSet:
    """A :class:`SampleSet` of two sources.

    Args:
        train, test: the training and the test samples.
        form: what a sample is.
    """

    def __init__(self, train: Source, test: Source, form: InputSpec) -> None:
        self._train, self._test, self.form = train, test, form

    def train(self, batch_size: int, seed: int, epoch: int, device: torch.device) -> Batches:
        """Return the batches of one epoch; see :class:`SampleSet`."""
        n = len(self._train)
        order, generator = shuffled(n, batch_size, seed, epoch, self.form.samples)
        seed = hash((seed, epoch))
        return EpochBatches(self._train, order, batch_size, device, generator, seed)

    def test(
        self, batch_size: int, device: torch.device, rank: int = 0, n_ranks: int = 1
    ) -> Batches:
        """Return every ``n_ranks``-th test sample from number ``rank`` on."""
        order = torch.arange(len(self._test))[rank::n_ranks]
        return EpochBatches(self._test, order, batch_size, device)


def shuffled(
    n: int, batch_size: int, seed: int, epoch: int, samples: str
) -> tuple[Tensor, torch.Generator]:
    """Return the order of ``n`` samples in an epoch, and the generator for all else in it.

    Raises:
        UserError: a training step takes more samples than there are.
    """
    if batch_size > n:
        raise UserError(
            f"a training step takes {batch_size} {samples} and there are {n}: make batch or"
            " microbatches smaller"
        )
    generator = torch.Generator().manual_seed(hash((seed, epoch)))
    return torch.randperm(n, generator=generator), generator


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on ``device``, without waiting for work queued there."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

"""Sets of samples, and their batches: a function of the seed, the epoch and the position."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from toolkit.errors import UserError, first_line, shortened
from toolkit.model.input_spec import Features, Images, InputSpec

T = TypeVar("T")

Batch = tuple[Tensor, Tensor]
"""Inputs ``[n, ...]`` and targets ``[n, ...]``."""

Chosen = Iterable[tuple[Tensor, Tensor]]
"""Sample numbers ``[n]`` and random numbers ``[k, n]`` of each batch, on the CPU."""

PartsOfBatch = Callable[[int], Sequence[int]]
"""A function from a batch's number to the parts of that batch to read."""


class Source(ABC):
    """Samples by number, varied by random numbers that are drawn for a whole batch."""

    @abstractmethod
    def __len__(self) -> int: ...

    def begin(self, generator: torch.Generator) -> "Source":
        """Return the samples of a training epoch."""
        return self

    def draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Return random numbers ``[k, n]`` for ``n`` samples; constants without a generator."""
        return torch.empty(0, n, dtype=torch.long)

    @abstractmethod
    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        """Yield batches on ``device``; ``seed`` is the epoch's."""


@dataclass(frozen=True)
class Batches:
    """A sized iterable of the batches of one epoch, or of the test.

    Attributes:
        source: where samples come from.
        order: numbers of the samples, ``[n]``.
        batch_size: samples of a batch.
        span: numbers of the batches that are read.
        device: where batches are made.
        generator: of random numbers, which are drawn on the CPU, so that every device sees the
            same samples. The test draws no numbers.
        seed: of random numbers that a process draws for its part alone.
        n_parts: equal parts of a batch.
        parts_of_batch: takes the number of a batch, and returns those of its parts to read.
    """

    source: Source
    order: Tensor
    batch_size: int
    span: range
    device: torch.device
    generator: torch.Generator | None = None
    seed: int = 0
    n_parts: int = 1
    parts_of_batch: PartsOfBatch = lambda batch: (0,)

    def __len__(self) -> int:
        return len(self.span)

    def between(self, first: int, last: int) -> "Batches":
        """Return the batches from number ``first`` up to, but without, ``last``."""
        return replace(self, span=self.span[first:last])

    def parts(self, n_parts: int, parts_of_batch: PartsOfBatch) -> Iterator[Batch]:
        """See :class:`toolkit.runtime.microbatches.Divisible`."""
        if self.batch_size % n_parts:
            raise UserError(
                f"a batch of {self.batch_size} samples cannot be divided into {n_parts}"
                f" micro-batches of equal size: make it a multiple of {n_parts}"
            )
        return iter(replace(self, n_parts=n_parts, parts_of_batch=parts_of_batch))

    def __iter__(self) -> Iterator[Batch]:
        return self.source.read(self._drawn(), self.seed, self.device)

    def _drawn(self) -> Iterator[tuple[Tensor, Tensor]]:
        # A copy, so that each pass over the batches draws the same numbers.
        generator = self.generator.clone_state() if self.generator else None
        # Numbered from -start, so the batches before the span have negative numbers::
        #
        #     order     | 0 1 2 | 3 4 5 | 6 7 8 | ...
        #     number        -1      0       1
        #     yielded             3   5   6   8
        #
        # with batch_size=3, span=range(1, 3), n_parts=3 and parts 0 and 2 of each batch.
        batches = self.order.split(self.batch_size)[: self.span.stop]
        for batch_number, sample_numbers in enumerate(batches, start=-self.span.start):
            # Drawn for every whole batch from the first on: a part, or a range of batches, then
            # has the random numbers that it has within the whole.
            random_numbers = self.source.draw(len(sample_numbers), generator)
            if batch_number < 0:
                continue
            part_numbers = [*self.parts_of_batch(batch_number)]
            if part_numbers:
                rows_of_parts = torch.arange(len(sample_numbers)).view(self.n_parts, -1)
                rows = rows_of_parts[part_numbers].flatten()
                yield sample_numbers[rows], random_numbers[:, rows]


class SampleSet:
    """Training and test samples with their answers: images and classes, or tokens and the next.

    Any object with ``form``, ``train`` and ``test`` can be trained on.

    Args:
        train, test: the samples.
        form: what a sample and its answer are.
        damaged: paths of the damaged samples that others replace; reading may add to them.
    """

    def __init__(
        self,
        train: Source,
        test: Source,
        form: InputSpec,
        damaged: Collection[str] = (),
    ) -> None:
        self._train = train
        self._test = test
        self.form = form
        self.damaged = damaged

    def train(
        self, batch_size: int, seed: int, epoch: int, device: torch.device
    ) -> Batches:
        """Return the full batches of one epoch, shuffled and augmented by (seed, epoch).

        Args:
            batch_size: samples of a training step, all micro-batches together.
            seed: seed of the run.
            epoch: number of the epoch, from 0.
            device: device of the batches.

        Raises:
            UserError: a training step takes more samples than there are.
        """
        n_samples = len(self._train)
        if batch_size > n_samples:
            raise UserError(
                f"a training step takes {batch_size} {self.form.samples} and there are {n_samples}:"
                " make batch or microbatches smaller"
            )
        # The hash of integers is the same in all processes, unlike that of strings.
        seed = hash((seed, epoch))
        generator = torch.Generator().manual_seed(seed)
        # The rest of the samples, less than a batch, is left out; the next epoch's order has
        # others.
        order = torch.randperm(n_samples, generator=generator)
        span = range(n_samples // batch_size)
        source = self._train.begin(generator)
        return Batches(source, order, batch_size, span, device, generator, seed)

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
        # Ranks differ by at most one sample, and none is tested twice.
        order = torch.arange(len(self._test))[rank::n_ranks]
        # Rounded up: the last batch may have fewer.
        span = range(-(-len(order) // batch_size))
        return Batches(self._test, order, batch_size, span, device)


class Datasets(SampleSet):
    """Two of torch's Datasets, whose samples the training process reads one by one.

    What a Dataset draws from torch's CPU generator, as torchvision's transforms do, follows from
    the seed, the epoch and the sample, so a resumed run sees the same samples.

    Reading raises UserError at the first sample that cannot be read, or differs from the form.

    Args:
        train, test: Datasets with a length, of pairs: a float tensor, ``[channels, height, width]``
            of an image or ``[features]``, and the number of a class.
        n_classes: number of classes.
        form: what a sample is; needed unless samples are images or features.

    Raises:
        UserError: a Dataset has no length, or its samples are not such pairs.
    """

    def __init__(
        self, train: Any, test: Any, n_classes: int, form: InputSpec | None = None
    ) -> None:
        # len() runs the user's code.
        for name, dataset in (("train", train), ("test", test)):
            try:
                length = len(dataset) if isinstance(dataset, Sized) else None
            except Exception as error:
                raise UserError(
                    f"{name}: its length cannot be read: {first_line(error)}"
                ) from error
            if not length:
                dataset_text = type(dataset).__name__ + (
                    "" if length is None else " of length 0"
                )
                raise UserError(
                    f"{name}: got a {dataset_text}; expected a Dataset with a length above 0"
                )
        # The seed does not matter, since all samples have one shape.
        form = form or _form_like(_sample(train, "train", 0, seed=0), n_classes)
        super().__init__(
            _Samples(train, "train", form), _Samples(test, "test", form), form
        )


def _sample(dataset: Any, name: str, index: int, seed: int) -> Any:
    """Return sample ``k``; raise UserError if the user's code cannot read it."""
    try:
        return seeded(hash((seed, index)), dataset.__getitem__, index)
    except Exception as error:
        error_kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        raise UserError(
            f"{name}: sample {index} cannot be read: {error_kind}{shortened(first_line(error))}"
        ) from error


def _form_like(sample: Any, n_classes: int) -> InputSpec:
    """Return the form of ``sample``; raise UserError if it is not an image or a vector."""
    items = sample if isinstance(sample, tuple | list) else (sample,)
    if (
        len(items) != 2
        or not isinstance(items[0], Tensor)
        or items[0].dim() not in (1, 3)
    ):
        item_texts = [
            f"{type(item).__name__} {list(getattr(item, 'shape', ''))}"
            for item in items
        ]
        raise UserError(
            f"the first sample is ({', '.join(item_texts)}); expected a pair of a tensor,"
            " [channels, height, width] or [features], and the number of a class; give form= if"
            " samples are something else"
        )
    if items[0].dim() == 1:
        if not items[0].is_floating_point():
            raise UserError(
                f"the first sample is a vector of {str(items[0].dtype).removeprefix('torch.')}:"
                " expected floating-point features; give form= if these are tokens"
            )
        return Features(len(items[0]), n_classes)
    channels, height, width = items[0].shape
    return Images(channels, height, width, n_classes)


@dataclass(frozen=True)
class _Samples(Source):
    """Samples of a user's Dataset, each checked against the form."""

    dataset: Any
    name: str  # train or test
    form: InputSpec

    def __len__(self) -> int:
        return len(self.dataset)

    def _pair(self, k: int, seed: int, expected: Tensor) -> Batch:
        """Return sample ``k`` and its classes; raise UserError if they are not as ``expected``."""
        sample = _sample(self.dataset, self.name, k, seed)
        n_classes = self.form.n_classes
        with suppress(Exception):  # it may be of any type
            pixels = sample[0]
            target = torch.as_tensor(sample[1])
            is_pair = len(sample) == 2
            fits = pixels.shape == expected.shape and pixels.dtype == expected.dtype
            # One class for an image, one for each token of a sequence.
            has_classes = target.shape == self.form.output(1)[1:-1]
            is_whole = not target.is_floating_point()
            in_range = target.min() >= 0 and target.max() < n_classes
            if is_pair and fits and has_classes and is_whole and in_range:
                return pixels, target.long()
        raise UserError(
            f"{self.name}: sample {k} is {_described(sample)}; expected a tensor"
            f" {_described(expected)}, as the first sample has, and a class from 0 to"
            f" {n_classes - 1}"
        )

    def read(self, batches: Chosen, seed: int, device: torch.device) -> Iterator[Batch]:
        expected = self.form.example(1, "meta")[0]
        for sample_numbers, _ in batches:
            pairs = (
                self._pair(index, seed, expected) for index in sample_numbers.tolist()
            )
            inputs, targets = map(torch.stack, zip(*pairs, strict=True))
            yield send(inputs, device), send(targets, device)


def _described(value: Any) -> str:
    """Describe ``value`` in a few words; tensors by their data type and shape."""
    if isinstance(value, tuple | list):
        return f"({', '.join(_described(item) for item in value[:3])})"
    if isinstance(value, Tensor) and value.dim():
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return shortened(repr(value), 80)


def seeded(seed: int, function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, drawn by ``seed``; torch's generator stays unchanged."""
    # Neither call touches GPUs: no state of theirs is saved, and torch.manual_seed, which would
    # seed them, is not used.
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        return function(*arguments)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on ``device``, without waiting for work queued there."""
    if device.type == "cuda":
        # A copy from unpinned memory waits for the work that is queued before it. torch's pinned
        # memory is used again only when the copy has ended.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@cache
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return one number per channel, ``[channels, 1, 1]``, copied to ``device`` once."""
    return torch.tensor(values, device=device).view(-1, 1, 1)


def normalise(
    pixels: Tensor, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """Return bytes ``[n, channels, height, width]`` as normalised floats, on their device."""
    shift = _constants(mean, pixels.device)
    scale = _constants(std, pixels.device)
    return pixels.float().div_(255).sub_(shift).div_(scale)

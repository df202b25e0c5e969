"""The batches of a run, as one rank reads them."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from toolkit.runtime.checks import divisible, moved, next_batch
from toolkit.runtime.interface import Batch, Divisible
from toolkit.runtime.stage import Values

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and type of each input of a micro-batch."""


class Source:
    """Gives a rank its micro-batches of every step.

    Args:
        batches: global ``(inputs, targets)``; of those that can be divided only what is read is
            loaded.
        n_microbatches: parts of a batch.
        wanted: the micro-batches that this rank reads at a step, ascending.
        first_step: of which the first batch is.
        device: where they are to be.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        n_microbatches: int,
        wanted: Callable[[int], Sequence[int]],
        first_step: int,
        device: torch.device,
    ) -> None:
        self.parts = wanted
        self._device = device
        self._first_step = first_step
        if isinstance(batches, Divisible):
            batches = batches.parts(n_microbatches, lambda k: wanted(first_step + k))
        else:
            everything = range(n_microbatches)
            self.parts = lambda step: everything
        self._batches: Iterator[Batch] = iter(batches)
        self._first: tuple[Values, Tensor] | None = None
        self._shape: Shape | None = None
        if self.parts(first_step):
            self._first = self._checked(first_step)

    @property
    def shape(self) -> Shape | None:
        """Of a micro-batch's inputs; None where this rank reads none."""
        return self._shape

    def __call__(self, step: int) -> tuple[Values, Tensor]:
        """The inputs and targets of the next step, which is ``step``."""
        if self._first is not None:
            found, self._first = self._first, None
            return found
        return self._checked(step)

    def _checked(self, step: int) -> tuple[Values, Tensor]:
        n_parts = len(self.parts(step))
        inputs, targets = divisible(*next_batch(self._batches, step - self._first_step), n_parts)
        shape = tuple(((len(x) // n_parts, *x.shape[1:]), x.dtype) for x in inputs)
        if self._shape is None:
            self._shape = shape
        if shape != self._shape:
            raise ValueError(
                f"the batches of one run are alike: the micro-batches of step {step} are"
                f" {_words(shape)} and the first ones {_words(self._shape)}; use drop_last=True,"
                " or a run each"
            )
        return moved(inputs, targets, self._device)


def _words(shape: Shape) -> str:
    return ", ".join(f"{list(size)} of {dtype}" for size, dtype in shape)

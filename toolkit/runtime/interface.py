"""What the training loop asks of a runtime, whichever it is."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from toolkit.runtime.result import StepResult
from toolkit.runtime.stage import Values
from toolkit.runtime.updater import Weights

Batch = tuple[Tensor | Values, Tensor]


@runtime_checkable
class Divisible(Protocol):
    """Batches of which a process can load a part."""

    def parts(self, n_parts: int, wanted: Callable[[int], Sequence[int]]) -> Iterable[Batch]:
        """The same batches; of batch k, only the ``wanted(k)`` of its ``n_parts`` equal parts.

        Batches of which nothing is wanted are left out.
        """
        ...


class Runtime(Protocol):
    """Trains a model on global batches, as one of ``n_ranks`` processes that all call it alike."""

    @property
    def rank(self) -> int: ...

    @property
    def n_ranks(self) -> int: ...

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each stage's next update."""
        ...

    def run(self, batches: Iterable[Batch], n_steps: int | None = None) -> Iterator[StepResult]:
        """Train on each global batch; yield each step's result, of this rank's micro-batches."""
        ...

    def module(self) -> nn.Module:
        """The whole model with the newest weights, on every rank. Every rank calls it."""
        ...

    def averages(self) -> Weights:
        """The average of each trained parameter, by its name; empty if none is kept.

        On every rank; every rank calls it.
        """
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum of all ranks' ``values``, on each of them. Every rank calls it."""
        ...

"""What the training loop asks of a runtime, whichever it is."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from toolkit.runtime.processes.world import World
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

    steps_done: int

    @property
    def world(self) -> World | None:
        """The processes that train together; None where there is one."""
        ...

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

    @property
    def own(self) -> Collection[int]:
        """The stages whose updates this rank makes."""
        ...

    def part(self) -> dict[str, Any]:
        """What this rank alone adds to :meth:`state_dict`. Every rank calls it.

        Tensors are the runtime's own, which the next step may change; those of which each rank has
        a share are DTensors.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, but for the data; a copy, on every rank.

        Every rank calls it. Any runtime that follows the same update rule can go on from it.
        """
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken. Every rank calls it.

        Weights and optimizer states of other stages than :attr:`own` may be meta tensors.

        Raises:
            ValueError: the state is of other stages, lacks weights that the schedule reads, or is
                formed otherwise than this runtime's.
        """
        ...

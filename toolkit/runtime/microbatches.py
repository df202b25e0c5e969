"""Reads batches, cuts them into micro-batches and collects the results of each step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.runtime.stage import Values

if TYPE_CHECKING:
    from toolkit.runtime.diagnostics import StageDelay

Batch = tuple[Tensor | Values, Tensor]
Share = tuple[Values, Tensor] | None
"""Inputs and targets of the micro-batches of a step that a process reads; None if of none."""

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and type of each input of a micro-batch."""

T = TypeVar("T")


@runtime_checkable
class Divisible(Protocol):
    """Batches of which a process can load a part."""

    def parts(self, n_parts: int, wanted: Callable[[int], Sequence[int]]) -> Iterable[Batch]:
        """The same batches; of batch k, only the ``wanted(k)`` of its ``n_parts`` equal parts.

        Batches of which nothing is wanted are left out.
        """
        ...


class BatchReader(Iterator[Share]):
    """Gives a process what it reads of each batch, on its device: nothing else is moved there.

    Args:
        batches: global ``(inputs, targets)``; of those that can be divided only what is read is
            loaded.
        n_microbatches: parts of a batch.
        wanted: the micro-batches that are read at a step, ascending.
        first_step: of which the first batch is.
        device: where they are to be; where they are if None.

    Attributes:
        alike: whether batches whose micro-batches are not formed as the first ones are refused.
        shape: of the first micro-batches' inputs; None until some have been seen.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        n_microbatches: int,
        wanted: Callable[[int], Sequence[int]],
        first_step: int,
        device: torch.device | None,
    ) -> None:
        self.alike = False
        self.shape: Shape | None = None
        self._n, self._wanted, self._step = n_microbatches, wanted, first_step
        self._device = device
        self._divided = isinstance(batches, Divisible)
        if isinstance(batches, Divisible):
            batches = batches.parts(n_microbatches, lambda k: wanted(first_step + k))
        self._batches = iter(batches)
        self._ahead: list[Share] = []

    def look(self) -> None:
        """Take the first batch already; refused if there is none."""
        self._ahead.append(next_batch(self, 0))

    def __next__(self) -> Share:
        if self._ahead:
            return self._ahead.pop()
        step, parts = self._step, self._wanted(self._step)
        self._step += 1
        if self._divided and not parts:
            return None
        n = len(parts) if self._divided else self._n
        inputs, targets = divisible(next(self._batches), n)
        self._compare(step, tuple(((len(x) // n, *x.shape[1:]), x.dtype) for x in inputs))
        if not parts:
            return None
        if len(parts) < n:
            *chosen, targets = (_chosen(x, n, parts) for x in (*inputs, targets))
            inputs = tuple(chosen)
        return moved(inputs, targets, self._device)

    def _compare(self, step: int, shape: Shape) -> None:
        self.shape = self.shape or shape
        if self.alike and shape != self.shape:
            raise UserError(
                f"the batches of one run are alike: the micro-batches of step {step} are"
                f" {_words(shape)} and the first ones {_words(self.shape)}; use drop_last=True,"
                " or a run each"
            )


def next_batch(batches: Iterator[T], taken: int) -> T:
    """The next of ``batches``, of which ``taken`` have been taken; refused if there is none."""
    try:
        return next(batches)
    except StopIteration:
        raise UserError(
            f"there are {taken} batches and more steps are to be run: make n_steps {taken}, or"
            " leave it out"
        ) from None


def take(batches: Iterable[T], n_steps: int | None) -> Iterator[T]:
    """As many of ``batches`` as there are steps, refused if there are fewer; or all of them."""
    source = iter(batches)
    if n_steps is None:
        yield from source
        return
    for taken in range(n_steps):
        yield next_batch(source, taken)


def divisible(batch: Batch, n_microbatches: int) -> tuple[Values, Tensor]:
    """The batch, refused if it cannot be divided into micro-batches of equal size."""
    inputs, targets = _pair(batch)
    n = n_microbatches
    sizes = {len(tensor) for tensor in (*inputs, targets)}
    if len(sizes) > 1 or (size := sizes.pop()) % n or not size:
        raise UserError(
            f"a batch is divided into {n} micro-batches of equal size, inputs and targets"
            f" alike: got {[len(tensor) for tensor in inputs]} inputs and {len(targets)}"
            f" targets; make it a multiple of {n} (drop_last=True in a DataLoader)"
        )
    return inputs, targets


def _pair(batch: object) -> tuple[Values, Tensor]:
    """Inputs and targets, refused if they are none."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UserError(
            "batches are pairs (inputs, targets), also where there is one, as in run([(x, y)]):"
            f" got a {type(batch).__name__}{many}"
        )
    inputs, targets = batch
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    for value in (*inputs, targets):
        if not isinstance(value, Tensor) or not value.dim():
            kind = "tensor of no dimension" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                "of a batch inputs are a tensor or a tuple of tensors, and targets a tensor, the"
                f" samples first: got a {kind}"
            )
    return inputs, targets


def moved(inputs: Values, targets: Tensor, device: torch.device | None) -> tuple[Values, Tensor]:
    """A batch on ``device``, if that is one.

    A GPU copies pinned memory while the CPU goes on; a CPU could not tell when a copy is whole.
    """
    ahead = device is not None and device.type == "cuda"
    *there, answers = (tensor.to(device, non_blocking=ahead) for tensor in (*inputs, targets))
    return tuple(there), answers


def _chosen(tensor: Tensor, n_parts: int, parts: Sequence[int]) -> Tensor:
    """Some of the ``n_parts`` equal parts; a copy only where they are several."""
    chunks = tensor.chunk(n_parts)
    return torch.cat([chunks[m] for m in parts]) if len(parts) > 1 else chunks[parts[0]]


def _words(shape: Shape) -> str:
    return ", ".join(f"{list(size)} of {dtype}" for size, dtype in shape)


@dataclass
class _Step:
    inputs: dict[int, Values]
    targets: dict[int, Tensor]


@dataclass
class _Results:
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


class MicrobatchQueue:
    """Cuts batches into micro-batches when the first of them is wanted, in order of their steps.

    Args:
        source: what is read of each step's batch.
        first_step: of which the first batch is.
        parts: the micro-batches of which that consists, in order.
    """

    def __init__(
        self, source: Iterator[Share], first_step: int, parts: Callable[[int], Sequence[int]]
    ) -> None:
        self._source = source
        self._first_step = self._next_step = first_step
        self._parts = parts
        self._steps: dict[int, _Step] = {}
        self._results: dict[int, _Results] = {}

    def inputs(self, step: int, microbatch: int) -> Values:
        return self._step(step).inputs[microbatch]

    def targets(self, step: int, microbatch: int) -> Tensor:
        return self._step(step).targets[microbatch]

    def finished(self, step: int, microbatch: int, loss: Tensor, output: Tensor) -> None:
        """Take the results of a micro-batch."""
        results = self._results.setdefault(step, _Results())
        results.losses[microbatch] = loss
        results.outputs[microbatch] = output

    def n_finished(self, step: int) -> int:
        """How many micro-batches of ``step`` have results."""
        return len(self._results[step].losses) if step in self._results else 0

    def result(self, step: int) -> "StepResult":
        """The results of ``step``; what was kept for it is dropped."""
        self._steps.pop(step, None)
        results = self._results.pop(step, _Results())
        order = tuple(sorted(results.losses))
        if not order:
            return StepResult(step, order, torch.empty(0), torch.empty(0))
        losses = torch.stack([results.losses[m] for m in order])
        return StepResult(step, order, losses, torch.cat([results.outputs[m] for m in order]))

    def skip_to(self, step: int) -> None:
        """Take what comes before ``step``, wanted or not."""
        while self._next_step < step:
            self._take()

    def _step(self, step: int) -> _Step:
        self.skip_to(step + 1)
        return self._steps[step]

    def _take(self) -> None:
        step, self._next_step = self._next_step, self._next_step + 1
        share = next_batch(self._source, step - self._first_step)
        if share is not None:
            (inputs, targets), parts = share, self._parts(step)
            chunks = zip(*(tensor.chunk(len(parts)) for tensor in inputs), strict=True)
            self._steps[step] = _Step(
                dict(zip(parts, chunks, strict=True)),
                dict(zip(parts, targets.chunk(len(parts)), strict=True)),
            )


@dataclass(frozen=True)
class StepResult:
    """One training step, as far as this process has seen it.

    Attributes:
        step: number of the training step, from 0.
        microbatches: micro-batches whose loss this process has computed, ascending: all of them in
            a single process, those of this rank among many.
        losses: losses of ``microbatches``, shape ``[len(microbatches)]``, detached.
        outputs: outputs of ``microbatches``, shape ``[len(microbatches) * b, ...]``, detached.
        delays: diagnostics of each stage's delay, at steps where they are taken.
    """

    step: int
    microbatches: tuple[int, ...]
    losses: Tensor
    outputs: Tensor
    delays: "tuple[StageDelay, ...]" = ()

    @property
    def loss(self) -> Tensor:
        """The mean of the losses: over all micro-batches it is what the step minimises.

        nan where this process has computed none, as a rank of a pipeline but the last.
        """
        return self.losses.mean()

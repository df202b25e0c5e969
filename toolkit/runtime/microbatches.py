"""Reads batches, cuts them into micro-batches and collects the results of each step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.runtime.stage import Values

Batch = tuple[Tensor | Values, Tensor]
Share = tuple[Values, Tensor] | None
"""Inputs and targets of the micro-batches of a step that a process reads; None if it reads none."""

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and type of each input of a micro-batch."""

T = TypeVar("T")


@runtime_checkable
class Divisible(Protocol):
    """Batches whose parts a process can load separately."""

    def parts(self, n_parts: int, wanted: Callable[[int], Sequence[int]]) -> Iterable[Batch]:
        """Yield of each batch k the ``wanted(k)`` of its ``n_parts`` equal parts.

        Batches with no wanted part are left out.
        """
        ...


class BatchReader(Iterator[Share]):
    """Yields what a process reads of each batch, and moves only that to its device.

    Args:
        batches: global ``(inputs, targets)``; of :class:`Divisible` ones only what is read is
            loaded.
        n_microbatches: parts of a batch.
        wanted: the micro-batches that are read at a step, ascending.
        first_step: training step of the first batch.
        device: where to move them; None: leave them where they are.

    Attributes:
        alike: whether to refuse micro-batches of another shape than the first ones.
        shape: of the first micro-batches' inputs; None until some have been read.
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
        """Read the first batch now; raise UserError without one."""
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
            found, first = (
                ", ".join(f"{list(size)} of {dtype}" for size, dtype in of)
                for of in (shape, self.shape)
            )
            raise UserError(
                f"step {step}: got micro-batches {found}; a run takes batches like its first, here"
                f" {first}. Use drop_last=True, or separate runs"
            )


def next_batch(batches: Iterator[T], taken: int) -> T:
    """Return the next batch; raise UserError if ``taken`` batches were all."""
    try:
        return next(batches)
    except StopIteration:
        raise UserError(
            f"n_steps: got more than the {taken} batches; use n_steps={taken}, or leave it out"
        ) from None


def take(batches: Iterable[T], n_steps: int | None) -> Iterator[T]:
    """Yield ``n_steps`` batches, or all; raise UserError if there are fewer."""
    source = iter(batches)
    if n_steps is None:
        yield from source
        return
    for taken in range(n_steps):
        yield next_batch(source, taken)


def divisible(batch: Batch, n_microbatches: int) -> tuple[Values, Tensor]:
    """Return the inputs, as a tuple, and the targets of a batch.

    Raises:
        UserError: it is not a batch, or cannot be divided into micro-batches of equal size.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        many = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UserError(
            f"a batch is a pair (inputs, targets), as in run([(x, y)]): got a"
            f" {type(batch).__name__}{many}"
        )
    inputs, targets = batch
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    for value in (*inputs, targets):
        if not isinstance(value, Tensor) or not value.dim():
            kind = "tensor of no dimension" if isinstance(value, Tensor) else type(value).__name__
            raise UserError(
                "a batch has tensors with samples in the first dimension, one or a tuple of inputs"
                f" and one of targets: got a {kind}"
            )
    sizes = [len(tensor) for tensor in (*inputs, targets)]
    if len({*sizes}) > 1 or sizes[0] % n_microbatches or not sizes[0]:
        raise UserError(
            f"inputs and targets of a batch have one size, a multiple of {n_microbatches}"
            f" micro-batches: got {sizes}; use drop_last=True in a DataLoader"
        )
    return inputs, targets


def moved(inputs: Values, targets: Tensor, device: torch.device | None) -> tuple[Values, Tensor]:
    """Return a batch on ``device``, if that is given."""
    # A GPU orders later work after an asynchronous copy; on the CPU nothing would wait for it.
    ahead = device is not None and device.type == "cuda"
    *there, answers = (tensor.to(device, non_blocking=ahead) for tensor in (*inputs, targets))
    return tuple(there), answers


def _chosen(tensor: Tensor, n_parts: int, parts: Sequence[int]) -> Tensor:
    """Some of the ``n_parts`` equal parts; a copy only if they are several."""
    chunks = tensor.chunk(n_parts)
    return torch.cat([chunks[m] for m in parts]) if len(parts) > 1 else chunks[parts[0]]


class MicrobatchQueue:
    """Cuts batches into micro-batches when the first of them is wanted, in order of their steps.

    Args:
        source: what this process reads of each step's batch.
        first_step: training step of the first batch.
        parts: the micro-batches in what it reads of a step, in order.
    """

    def __init__(
        self, source: Iterator[Share], first_step: int, parts: Callable[[int], Sequence[int]]
    ) -> None:
        self._source = source
        self._first_step = self._next_step = first_step
        self._parts = parts
        self._steps: dict[int, dict[int, tuple[Values, Tensor]]] = {}  # step -> micro-batch
        self._results: defaultdict[int, dict[int, tuple[Tensor, Tensor]]] = defaultdict(dict)

    def inputs(self, step: int, microbatch: int) -> Values:
        """Return the inputs of a micro-batch, ``[b, ...]`` each."""
        self.skip_to(step + 1)
        return self._steps[step][microbatch][0]

    def targets(self, step: int, microbatch: int) -> Tensor:
        """Return the targets of a micro-batch, ``[b, ...]``."""
        self.skip_to(step + 1)
        return self._steps[step][microbatch][1]

    def finished(self, step: int, microbatch: int, loss: Tensor, output: Tensor) -> None:
        """Take the results of a micro-batch."""
        self._results[step][microbatch] = loss, output

    def n_finished(self, step: int) -> int:
        """Return how many micro-batches of ``step`` have results."""
        return len(self._results[step])

    def result(self, step: int) -> "StepResult":
        """Return the results of ``step``, and drop everything kept for it."""
        self._steps.pop(step, None)
        results = self._results.pop(step, {})
        order = tuple(sorted(results))
        if not order:
            return StepResult(step, order, torch.empty(0), torch.empty(0))
        losses, outputs = zip(*(results[m] for m in order), strict=True)
        return StepResult(step, order, torch.stack(losses), torch.cat(outputs))

    def skip_to(self, step: int) -> None:
        """Read every batch before ``step``, even unused ones: all ranks end at the same batch."""
        while self._next_step < step:
            share = next_batch(self._source, self._next_step - self._first_step)
            if share is not None:
                parts = self._parts(self._next_step)
                *inputs, targets = (x.chunk(len(parts)) for x in (*share[0], share[1]))
                pairs = zip(zip(*inputs, strict=True), targets, strict=True)
                self._steps[self._next_step] = dict(zip(parts, pairs, strict=True))
            self._next_step += 1


@dataclass(frozen=True)
class StageDelay:
    """What the delay does to the gradient of one stage at training step t.

    Attributes:
        step: t.
        stage: j.
        delay: steps by which the weights that it reads are late, the mean over micro-batches.
        cosine: between the gradient that the schedule sums and the fresh one, that of the newest
            weights of every stage on the same batch. 1 where nothing is late; nan where one of
            the gradients is 0.
        gradient: norm of the first of them.
        fresh_gradient: norm of the second.
        weights: norm of theta_t.
        moved: norm of theta_t - theta_{t-1}; nan at the first step.
    """

    step: int
    stage: int
    delay: float
    cosine: float
    gradient: float
    fresh_gradient: float
    weights: float
    moved: float


@dataclass(frozen=True)
class StepResult:
    """One training step, as far as this process has seen it.

    Attributes:
        step: number of the training step, from 0.
        microbatches: micro-batches whose loss this process has computed, ascending: all of them in
            a single process, those of this rank among many.
        losses: losses of ``microbatches``, shape ``[len(microbatches)]``, detached.
        outputs: outputs of ``microbatches``, shape ``[len(microbatches) * b, ...]``, detached.
        delays: diagnostics of each stage's delay, at the steps that measure them.
    """

    step: int
    microbatches: tuple[int, ...]
    losses: Tensor
    outputs: Tensor
    delays: tuple[StageDelay, ...] = ()

    @property
    def loss(self) -> Tensor:
        """The mean of the losses, shape ``[]``; over all micro-batches, what the step minimises.

        nan if this process has computed no loss, such as a rank that lacks the last stage.
        """
        return self.losses.mean()

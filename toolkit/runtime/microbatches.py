"""Reads batches, cuts them into micro-batches and collects the results of each step."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from toolkit.errors import UserError
from toolkit.model.structure import tensors_of
from toolkit.runtime.losses import LossValue, nonzero
from toolkit.runtime.stage import Values
from toolkit.schedule import Schedule

GlobalBatch = tuple[Any, Tensor]
"""Inputs, structured as the example of :func:`toolkit.model.partition`, and targets."""

Share = tuple[Values, Tensor] | None
"""Inputs and targets of the micro-batches of a step that a process reads; None if it reads none."""

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""The shape and type of each input of a micro-batch."""


@runtime_checkable
class Divisible(Protocol):
    """Batches whose parts a process can load separately."""

    def parts(
        self, n_parts: int, parts_of_batch: Callable[[int], Sequence[int]]
    ) -> Iterable[GlobalBatch]:
        """Yield of each batch k those of its ``n_parts`` equal parts in ``parts_of_batch(k)``.

        Batches without such a part are left out.
        """
        ...


class BatchReader(Iterator[Share]):
    """Yields what a process reads of ``n_steps`` batches, or of all; UserError if they end before.

    Args:
        batches: the batches. Of :class:`Divisible` ones only what is read is loaded.
        n_microbatches: number of micro-batches in each.
        microbatches_of: function from a step to the micro-batches that are read, ascending.
        first_step: the step of the first batch.
        device: where they move, if any.
        n_steps: number of batches to read; None: all.
        same_sized: whether all must have the ``shape`` of the first.

    Attributes:
        shape: shape and type of each input of a micro-batch, once the first batch is read.
        n_steps: number of batches that are left, if it is known.

    Raises:
        UserError: there are fewer batches, or one cannot be divided.
    """

    def __init__(
        self,
        batches: Iterable[GlobalBatch],
        n_microbatches: int,
        microbatches_of: Callable[[int], Sequence[int]],
        first_step: int,
        device: torch.device | None,
        n_steps: int | None = None,
        *,
        same_sized: bool = False,
    ) -> None:
        self.same_sized = same_sized
        self.shape: Shape | None = None
        self.n_steps = n_steps
        self._n_microbatches = n_microbatches
        self._microbatches_of = microbatches_of
        self._device = device
        self._shares = self._read(batches, first_step)

    def take(self, n_steps: int) -> "BatchReader":
        """Return a reader of the next ``n_steps`` batches, or of those that are left."""
        reader = copy(self)
        reader._shares = islice(self._shares, n_steps)
        if self.n_steps is not None:
            reader.n_steps = min(n_steps, self.n_steps)
            self.n_steps -= reader.n_steps
        return reader

    def look(self) -> Share:
        """Read the first batch now, so that a wrong one is refused before any step begins."""
        first = next(self._shares)
        # Put back, as if it had not been read.
        self._shares = chain([first], self._shares)
        return first

    def __next__(self) -> Share:
        return next(self._shares)

    def _read(self, batches: Iterable[GlobalBatch], first_step: int) -> Iterator[Share]:
        divided = isinstance(batches, Divisible)
        if isinstance(batches, Divisible):
            # So a process loads only the samples that it reads.
            batches = batches.parts(
                self._n_microbatches,
                lambda index: self._microbatches_of(first_step + index),
            )
        remaining = iter(batches)
        n_steps = self.n_steps
        numbers: Iterable[int] = count()
        if n_steps is not None:
            numbers = range(n_steps)
        for n_read in numbers:
            microbatches = self._microbatches_of(first_step + n_read)
            # Of divisible batches it is left out, so there is nothing to take. The step counts all
            # the same.
            if divided and not microbatches:
                yield None
                continue
            n_parts = self._n_microbatches
            if divided:
                n_parts = len(microbatches)
            try:  # in no variable, which would keep the batch until the next one
                yield self._share(
                    next(remaining), n_parts, microbatches, first_step + n_read
                )
            except StopIteration:
                if n_steps is None:
                    return
                raise UserError(
                    f"n_steps: got {n_steps}; expected at most {n_read}, the number of batches."
                    f" Use n_steps={n_read}"
                ) from None

    def _share(
        self, batch: GlobalBatch, n_parts: int, microbatches: Sequence[int], step: int
    ) -> Share:
        """Return some micro-batches of a batch of ``n_parts``."""
        # Checked also where nothing is read, so that all ranks refuse the same batch.
        inputs, targets = divisible(batch, n_parts)
        shape = tuple(
            ((len(tensor) // n_parts, *tensor.shape[1:]), tensor.dtype)
            for tensor in inputs
        )
        self.shape = self.shape or shape
        if self.same_sized and shape != self.shape:
            raise UserError(
                f"step {step}: got micro-batches {_text(shape)}; expected {_text(self.shape)}, as"
                " in the run's first batch. Use drop_last=True, or separate runs"
            )
        if not microbatches:
            return None
        share_inputs = tuple(
            _selected(tensor, n_parts, microbatches, self._device) for tensor in inputs
        )
        return share_inputs, _selected(targets, n_parts, microbatches, self._device)


def _text(shape: Shape) -> str:
    return ", ".join(f"{list(size)} of {dtype}" for size, dtype in shape)


def _selected(
    tensor: Tensor,
    n_parts: int,
    microbatches: Sequence[int],
    device: torch.device | None,
) -> Tensor:
    """Return the chosen ones of ``n_parts`` equal parts, joined, on ``device``."""
    if len(microbatches) < n_parts:
        chunks = tensor.chunk(n_parts)
        selected_chunks = [chunks[microbatch] for microbatch in microbatches]
        tensor = selected_chunks[0]
        if len(selected_chunks) > 1:
            tensor = torch.cat(selected_chunks)
    # A GPU orders later work after an asynchronous copy; on the CPU nothing would wait for it.
    return tensor.to(device, non_blocking=device is not None and device.type == "cuda")


def divisible(batch: GlobalBatch, n_microbatches: int) -> tuple[Values, Tensor]:
    """Return the inputs, as a tuple, and the targets of a batch; refuse an indivisible one."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise UserError(f"batch: got a {_kind(batch)}; expected a pair (x, y)")
    inputs = tensors_of(batch[0])
    targets = batch[1]
    # What has no tensors is refused as it is.
    for value in (*(inputs or batch[:1]), targets):
        if not isinstance(value, Tensor) or not value.dim():
            raise UserError(
                f"batch: got a {_kind(value)}; expected tensors of samples, [b, ...]"
            )
    sizes = [len(tensor) for tensor in (*inputs, targets)]
    if len({*sizes}) > 1 or sizes[0] % n_microbatches or not sizes[0]:
        raise UserError(
            f"batch: got sizes {sizes}; expected one size, a multiple of {n_microbatches}"
            " micro-batches. Use drop_last=True in a DataLoader"
        )
    return inputs, targets


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}"
    name = type(value).__name__
    if isinstance(value, tuple | list):
        return f"{name} of {len(value)}"
    return name


class MicrobatchQueue:
    """Cuts batches into micro-batches when the first of them is needed, in order of their steps.

    Args:
        source: yields what this process reads.
        first_step: step of the first batch.
        microbatches_of: function from a step to the micro-batches that this process reads of it.
    """

    def __init__(
        self,
        source: Iterator[Share],
        first_step: int,
        microbatches_of: Callable[[int], Sequence[int]],
    ) -> None:
        self._source = source
        self._next_step = first_step
        self._microbatches_of = microbatches_of
        # Step -> micro-batch.
        self._steps: dict[int, dict[int, tuple[Values, Tensor]]] = {}
        # Likewise. Steps overlap, so several have results at a time.
        self._results: defaultdict[int, dict[int, tuple[LossValue, Tensor]]] = (
            defaultdict(dict)
        )

    def microbatch(self, step: int, m: int) -> tuple[Values, Tensor]:
        """Return the inputs and targets of a micro-batch, ``[b, ...]`` each."""
        self.skip_to(step + 1)
        return self._steps[step][m]

    def finished(
        self, step: int, microbatch: int, loss: LossValue, output: Tensor
    ) -> None:
        """Take the results of a micro-batch, detached; the value of ``loss`` is its mean."""
        self._results[step][microbatch] = loss, output

    def n_finished(self, step: int) -> int:
        """Return how many micro-batches of ``step`` have results."""
        return len(self._results[step])

    def result(self, step: int) -> "StepResult":
        """Return the results of ``step``, and drop everything kept for it."""
        self._steps.pop(step, None)
        results = self._results.pop(step, {})
        losses = {microbatch: loss for microbatch, (loss, _) in results.items()}
        outputs = [results[microbatch][1] for microbatch in sorted(results)] or [
            torch.empty(0)
        ]
        return step_result(step, losses, torch.cat(outputs))

    def skip_to(self, step: int) -> None:
        """Read every batch before ``step``, even unused ones: all ranks end at the same batch."""
        while self._next_step < step:
            share = next(self._source)
            if share is not None:
                inputs, targets = share
                microbatches = self._microbatches_of(self._next_step)
                n_read = len(microbatches)
                chunks_of_inputs = zip(
                    *(tensor.chunk(n_read) for tensor in inputs), strict=True
                )
                pairs = zip(chunks_of_inputs, targets.chunk(n_read), strict=True)
                self._steps[self._next_step] = dict(
                    zip(microbatches, pairs, strict=True)
                )
            self._next_step += 1


@dataclass(frozen=True)
class StageDelay:
    """What the delay does to the gradient of one stage at training step t.

    Attributes:
        step, stage: t and j.
        delay: steps by which the weights that it reads are late, the mean over micro-batches.
        cosine: between the gradient that the schedule sums and the fresh one, that of the newest
            weights of every stage on the same batch; nan where one of the gradients is 0.
        gradient, fresh_gradient: norms of the two.
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
        losses: mean losses of ``microbatches``, shape ``[len(microbatches)]``, detached.
        outputs: outputs of ``microbatches``, shape ``[len(microbatches) * b, ...]``, detached: the
            first tensor of what the model returns.
        delays: diagnostics of each stage's delay, at the steps that measure them.
        counts: counts of ``losses``, float64, shape ``[len(microbatches)]``, if the loss is a sum
            with a count; else None.
    """

    step: int
    microbatches: tuple[int, ...]
    losses: Tensor
    outputs: Tensor
    delays: tuple[StageDelay, ...] = ()
    counts: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The mean of the losses by their counts; over all micro-batches, what the step minimises.

        Shape ``[]``. nan if this process has computed no loss, such as a rank that lacks the last
        stage.
        """
        if self.counts is None:
            return self.losses.mean()
        total, count = self.loss_sum()
        return (total / nonzero(count)).to(self.losses.dtype)

    def loss_sum(self) -> Tensor:
        """Return the sum of the losses by their counts, and of the counts: float64, shape ``[2]``.

        A mean loss counts as 1, so that sums over steps and ranks give their mean loss.
        """
        losses = self.losses.double()
        counts = self.counts
        if counts is None:
            counts = torch.ones_like(losses)
        # float64, since sums over a long epoch would lose digits in 32 bits.
        return torch.stack([(losses * counts).sum(), counts.sum()])


def step_result(
    step: int, losses: Mapping[int, LossValue], outputs: Tensor
) -> StepResult:
    """Return the result of micro-batches by their numbers; the values of ``losses`` are means."""
    order = tuple(sorted(losses))
    if not order:
        return StepResult(step, (), torch.empty(0), outputs)
    means = torch.stack([losses[microbatch].value for microbatch in order])
    counts = [
        loss.count for _, loss in sorted(losses.items()) if loss.count is not None
    ]
    stacked_counts = None
    if counts:
        stacked_counts = torch.stack(counts)
    return StepResult(step, order, means, outputs, counts=stacked_counts)


def packed(chunks: Sequence[Tensor], microbatches: Sequence[int]) -> Any:
    """Join the chunks of ``microbatches`` into one array, to send it.

    Arrays pickle faster than tensors, and a view would pickle its whole.

    Args:
        chunks: ``[microbatch]``, parts of a global batch.
        microbatches: numbers of those to join.
    """
    tensor = torch.cat([chunks[microbatch].cpu() for microbatch in microbatches])
    try:
        return tensor.numpy()
    except TypeError:  # a type that numpy lacks
        return tensor


def microbatches_read(schedule_plan: Schedule, rank: int, step: int) -> list[int]:
    """Return the micro-batches whose inputs or targets a first or last stage on ``rank`` takes."""
    end_stages = (0, schedule_plan.n_stages - 1)
    microbatches = []
    for microbatch in range(schedule_plan.n_microbatches):
        readers = {schedule_plan.rank(stage, microbatch, step) for stage in end_stages}
        if rank in readers:
            microbatches.append(microbatch)
    return microbatches

"""The micro-batches that a process runs, step by step, and the results that come of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from toolkit.runtime.result import StepResult
from toolkit.runtime.source import Share, next_batch
from toolkit.runtime.stage import Values


@dataclass
class _Step:
    inputs: dict[int, Values]
    targets: dict[int, Tensor]


@dataclass
class _Results:
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Feed:
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

    def result(self, step: int) -> StepResult:
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

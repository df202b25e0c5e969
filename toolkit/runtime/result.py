"""What a runtime reports of a training step."""

from dataclasses import dataclass

from torch import Tensor

from toolkit.runtime.diagnostics import StageDelay


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
    delays: tuple[StageDelay, ...] = ()

    @property
    def loss(self) -> Tensor:
        """The mean of the losses: over all micro-batches it is what the step minimises.

        nan where this process has computed none, as a rank of a pipeline but the last.
        """
        return self.losses.mean()

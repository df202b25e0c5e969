"""What a runtime reports of a training step."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """One training step.

    Attributes:
        step: which one, from 0.
        losses: the loss of each micro-batch, shape ``[n_microbatches]``, detached.
        outputs: the model's outputs, shape ``[n_microbatches * b, ...]``, detached.
    """

    step: int
    losses: Tensor
    outputs: Tensor

    @property
    def loss(self) -> Tensor:
        """The mean loss: what the step minimises."""
        return self.losses.mean()

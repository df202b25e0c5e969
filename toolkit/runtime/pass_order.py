"""The order of a custom training loop's calls."""

from torch import Tensor

from toolkit.errors import UserError

# A training step with accumulate=2, and `next_call` before each call:
#
#     model(x)   loss.backward()   model(x)   loss.backward()   optimizer.step()
#     forward    backward          forward    backward          step
_CALLS = {
    "forward": "model(x)",
    "backward": "loss.backward()",
    "step": "optimizer.step()",
}


class PassOrder:
    """Which call of the loop is next: ``accumulate`` times a forward and a backward, then a step.

    Attributes:
        accumulate: passes of a training step.
        next_call: ``forward``, ``backward`` or ``step``.
        n_passes: passes of the training step that have ended.
        steps_done: training steps that have ended.
        count: the count of the loss whose backward runs, if the loop has given one.
    """

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.next_call = "forward"
        self.n_passes = 0
        self.steps_done = 0
        self.count: Tensor | None = None

    @property
    def between_steps(self) -> bool:
        """Whether every training step that has begun has ended."""
        return self.next_call == "forward" and not self.n_passes

    def check(self, call: str, caller: str, *, between_steps: bool = False) -> None:
        """Raise UserError unless ``call`` is next.

        Args:
            call: as in ``next_call``.
            caller: what the script calls or does, for the message.
            between_steps: whether it has to be between two training steps, too.
        """
        if self.next_call != call or (between_steps and self.n_passes):
            raise UserError(
                f"{caller}: expected {_CALLS[self.next_call]}, after"
                f" {self.n_passes} of {self.accumulate} passes of training step"
                f" {self.steps_done}. Each pass is model(x) and loss.backward(), and the last is"
                " followed by optimizer.step(); accumulate= says how many there are, and eval() or"
                " torch.no_grad() computes without training"
            )

    def end_forward(self) -> None:
        """Note the end of a forward."""
        self.next_call = "backward"

    def end_backward(self) -> None:
        """Note the end of a backward, and so of a pass."""
        self.n_passes += 1
        self.next_call = "forward"
        if self.n_passes == self.accumulate:
            self.next_call = "step"

    def end_step(self) -> None:
        """Note the end of a training step."""
        self.n_passes = 0
        self.next_call = "forward"
        self.steps_done += 1

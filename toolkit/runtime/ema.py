"""An exponential moving average of weights, and of batch norms' running statistics."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class WeightAverage:
    """Follows the newest weights of a stage, update by update.

    With the decay d_t of update t, from 0 on::

        average_{t+1} = d_t * average_t + (1 - d_t) * newest_{t+1}
        d_t = min(decay, (1 + t) / (10 + t))

    Source: the decay is that of TensorFlow's ``ExponentialMovingAverage`` with ``num_updates``.

    Args:
        decay: largest decay, above 0 and below 1.

    Attributes:
        weights: the average, by name; empty before :meth:`begin`.
        n_updates: updates so far.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self.n_updates = 0

    def begin(self, newest: Mapping[str, Tensor]) -> None:
        """Start with a copy of the weights before the first update, unless it has started."""
        if not self.weights:
            self.weights = {
                name: tensor.detach().clone() for name, tensor in newest.items()
            }

    @torch.no_grad()
    def update(self, newest: Mapping[str, Tensor]) -> None:
        """Follow an update, which has made the weights ``newest``."""
        if not self.weights:
            return  # a stage without weights and running statistics
        # The smaller decay at first lets the random first weights be forgotten soon: by a decay of
        # 0.999 they would still be 37 % of the average after 1,000 updates.
        decay = min(self.decay, (1 + self.n_updates) / (10 + self.n_updates))
        torch._foreach_lerp_(
            [*self.weights.values()], [newest[name] for name in self.weights], 1 - decay
        )
        self.n_updates += 1

    def state(self) -> dict[str, Any]:
        """Return the average and the number of its updates."""
        return {"weights": self.weights, "n_updates": self.n_updates}

    def load(self, state: Mapping[str, Any], device: torch.device | None) -> None:
        """Continue from a copy of a :meth:`state`, on ``device``."""
        # A copy, also on the same device: the average changes in place, the state is the caller's.
        place = partial(torch.Tensor.to, device=device, copy=True)
        self.weights = tree_map_only(Tensor, place, state["weights"])
        self.n_updates = state["n_updates"]

"""An exponential moving average of a stage's weights and running statistics."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class MovingAverage:
    """Follows the weights of one stage, and the statistics by which its norms are tested.

    Args:
        decay: share of the old average that an update keeps, in the long run. At update t it is
            at most (1 + t) / (10 + t), so that the first weights are soon forgotten.

    Attributes:
        weights: the average, by name; empty before the first update.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        self._n_updates = 0

    def begin(self, weights: Mapping[str, Tensor]) -> None:
        """Start with the ``weights`` before the first update; later calls change nothing."""
        if not self.weights:
            self.weights = {name: tensor.detach().clone() for name, tensor in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """Take in the ``weights`` that an update has made."""
        decay = min(self.decay, (1 + self._n_updates) / (10 + self._n_updates))
        self._n_updates += 1
        if weights:
            newest = [weights[name] for name in self.weights]
            torch._foreach_lerp_([*self.weights.values()], newest, 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "n_updates": self._n_updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights, self._n_updates = state["weights"], state["n_updates"]

"""The learning rates of updates that have not been made, for predictions of weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class FutureRates:
    """Learning rates and decoupled weight decays, which follow from optimizer and scheduler alone.

    So every rank knows them, also for stages that it does not update.

    Args:
        masters: a stage's parameters by name, on which no other optimizer works. They are freed.
        optimizer: an optimizer of ``masters`` before its first step.
        scheduler: its learning-rate schedule, if any.
    """

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
    ) -> None:
        group_of_parameter = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                group_of_parameter[id(parameter)] = index
            group["params"] = []  # free the memory
        self._group_of_name = {
            name: group_of_parameter[id(p)] for name, p in masters.items()
        }
        # [update][parameter group].
        self._rates_of_updates: list[list[tuple[float, float]]] = []
        self._next_rates = self._follow(optimizer, scheduler)

    def at(self, update: int) -> dict[str, tuple[float, float]]:
        """Return the learning rate and the decoupled weight decay of each weight at ``update``."""
        while len(self._rates_of_updates) <= update:
            self._rates_of_updates.append(next(self._next_rates))
        rates = self._rates_of_updates[update]
        return {name: rates[group] for name, group in self._group_of_name.items()}

    @staticmethod
    def _follow(
        optimizer: Optimizer, scheduler: LRScheduler | None
    ) -> Iterator[list[tuple[float, float]]]:
        """Yield the learning rate and decay of each parameter group, update by update."""
        # Or torch warns that no step of it precedes.
        vars(optimizer)["_opt_called"] = True
        while True:
            groups = optimizer.param_groups
            # Before the scheduler's step: the rate of update t is the one after t steps of the
            # scheduler. As floats, since a group's rate may be a tensor that is changed in place.
            yield [
                (float(group["lr"]), _decoupled_decay(optimizer, group))
                for group in groups
            ]
            if scheduler is not None:
                scheduler.step()


def _decoupled_decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the weight decay that is applied apart from the gradient's step, as AdamW does."""
    is_decoupled = isinstance(optimizer, torch.optim.AdamW | torch.optim.Muon)
    if is_decoupled or group.get("decoupled_weight_decay"):
        return float(group["weight_decay"])
    return 0.0

"""The optimizer of a training loop of the user's own, in front of those of the stages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.runtime.updater import MakeOptimizer, by_name, takes_names

Settings = list[dict[str, Any]]
"""The options of each parameter group."""


class Steps(Protocol):
    """What ends training steps, and has a state beside the newest weights."""

    def end_step(self) -> None:
        """End a training step."""

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""


class StepOptimizer(Optimizer):
    """``model.optimizer`` of a :class:`CyclicDataParallel`, for schedulers and generic loops.

    Args:
        steps: the wrapped model.
        made: an optimizer of the whole model, whose parameter groups this one takes.
    """

    def __init__(self, steps: Steps, made: Optimizer) -> None:
        super().__init__(made.param_groups, made.defaults)
        self._steps = steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a training step, after a last pass by ``closure``, if any."""
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        self._steps.end_step()
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each training step begins without gradients."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on beside the newest weights. Every rank calls it."""
        groups = super().state_dict()["param_groups"]
        return {"param_groups": groups, "cyclic": self._steps.optimizer_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`; load the weights before. Every rank calls it."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({k: x for k, x in saved.items() if k != "params"})
        self._steps.load_optimizer_state(state_dict["cyclic"])


class FollowsSettings:
    """Gives a stage's optimizer the options that ``model.optimizer`` had as each step began."""

    def __init__(self, optimizer: Optimizer, known: Mapping[int, Settings]) -> None:
        self.optimizer, self.known, self.n = optimizer, known, 0
        optimizer.register_step_pre_hook(lambda *_: self._set())
        self._set()

    def step(self) -> None:
        """Go over to the options of the next update."""
        self.n += 1
        self._set()

    def _set(self) -> None:
        places = vars(self.optimizer)["places"]
        if (settings := self.known.get(self.n)) is not None:
            for group, place in zip(self.optimizer.param_groups, places, strict=True):
                if place is not None:
                    group.update(settings[place])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates."""
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after as many updates."""
        self.n = state["n"]
        self._set()


def made_alike(make: MakeOptimizer, trained: Sequence[tuple[str, nn.Parameter]]) -> MakeOptimizer:
    """Return ``make`` whose optimizers know the place of their groups in that of the whole model.

    In ``places``: for each of their groups the number of the whole model's; None if it is empty.
    """
    place_of: dict[str, int] = {}

    @by_name
    def made(pairs: list[tuple[str, nn.Parameter]]) -> Optimizer:
        optimizer = make([*pairs] if takes_names(make) else [p for _, p in pairs])
        names = {id(p): name for name, p in pairs}
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if not place_of:  # the first is the whole model's
            place_of.update((name, k) for k, group in enumerate(groups) for name in group)
        vars(optimizer)["places"] = [place_of[group[0]] if group else None for group in groups]
        return optimizer

    return made

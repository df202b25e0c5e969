"""The optimizer of a custom training loop, in front of the optimizers of the stages."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.runtime.stage_optimizers import GroupOptions, options_of_group


@dataclass(frozen=True)
class Clip:
    """Arguments of a call of ``clip_grad_norm_``."""

    max_norm: float
    norm_type: float = 2.0


@dataclass(frozen=True)
class Settings:
    """What the loop has set for the update of a training step.

    Attributes:
        options: of each parameter group those options that the loop has ever changed. Optimizers
            that count in their options would be set back by the others.
        clip: largest norm of a stage's gradient, if the loop limits it.
    """

    options: list[GroupOptions]
    clip: Clip | None = None


class Steps(Protocol):
    """What ends training steps, and has a state besides the newest weights."""

    def end_step(self) -> None:
        """End a training step."""

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""

    def options_loaded(self) -> None:
        """Take the optimizer's options for those that the stages' optimizers have."""

    def parameter_groups_changed(self) -> None:
        """Train by the parameter groups that the optimizer has now."""

    def evaluate_averages(self, averaged: bool) -> None:
        """Set whether evaluation uses the weights that the optimizer averages."""


class StepOptimizer(Optimizer):
    """``model.optimizer`` of a :class:`CyclicDataParallel`, for schedulers and generic loops.

    It shares the parameter groups of the finished optimizer, so a scheduler of either changes both.

    Args:
        steps: the wrapped model.
        finished: an optimizer of the whole model.
    """

    # Then GradScaler leaves the scale to this step, which refuses it, and does not look for
    # gradients that other ranks have.
    _step_supports_amp_scaling = True

    def __init__(self, steps: Steps, finished: Optimizer) -> None:
        # Before torch's own: it adds the groups by add_param_group.
        self._steps = steps
        self._finished = finished
        super().__init__(finished.param_groups, finished.defaults)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a training step, after a last pass by ``closure``, if any.

        Raises:
            UserError: a GradScaler scales the loss.
        """
        if vars(self).pop("grad_scale", None) is not None:
            raise UserError(
                "GradScaler: got a scaled loss; expected none, since stages update at different"
                " times. Use torch.autocast with bfloat16, or"
                " options=StepOptions(precision='fp16', loss_scale=1024)"
            )
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        # A scheduler of the finished optimizer would warn that no step precedes its own.
        vars(self._finished)["_opt_called"] = True
        self._steps.end_step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: each training step begins without gradients."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, also while the model trains. Every rank calls it."""
        super().add_param_group(param_group)
        # torch's constructor adds the groups of the finished optimizer in this way, too.
        if len(self.param_groups) > len(self._finished.param_groups):
            self._finished.param_groups.append(self.param_groups[-1])
            self._steps.parameter_groups_changed()

    def train(self) -> None:
        """Evaluate with the weights that are trained; for optimizers that also have averages."""
        self._steps.evaluate_averages(False)

    def eval(self) -> None:
        """Evaluate with the weights that the optimizer averages, if it does."""
        self._steps.evaluate_averages(True)

    def state_dict(self) -> dict[str, Any]:
        """Return what the next steps depend on besides the newest weights.

        Without its entry ``cyclic`` it is the state of the optimizer under torch's own DDP. A rank
        may call it alone, between training steps.
        """
        return self._steps.optimizer_state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, or from that of DDP's optimizer; load weights before.

        Every rank calls it.

        Raises:
            UserError: the state has other parameter groups.
        """
        self._steps.load_optimizer_state(state_dict)
        for group, saved in zip(
            self.param_groups, state_dict["param_groups"], strict=True
        ):
            group.update(options_of_group(saved))
        self._steps.options_loaded()

    def forget_state(self) -> None:
        """Free the finished optimizer's state, which those of the stages have taken over."""
        self._finished.state.clear()


class FollowsSettings:
    """Gives a stage's optimizer what the loop set for each step; stands for its scheduler."""

    def __init__(
        self, optimizer: Optimizer, settings_of_steps: Mapping[int, Settings]
    ) -> None:
        self.optimizer = optimizer
        self.settings_of_steps = settings_of_steps
        # Updates that are done, which is the number of the next training step. A rank may update a
        # stage after its loop has begun later steps, so settings are kept by step.
        self.n = 0
        optimizer.register_step_pre_hook(lambda *_: self._before_step())
        self._set()

    def step(self) -> None:
        """Go over to the options of the next update."""
        self.n += 1
        self._set()

    def _set(self) -> None:
        settings = self.settings_of_steps.get(self.n)
        if settings is not None:
            # A group that was added later has no settings for the steps before.
            for group, options in zip(
                self.optimizer.param_groups, settings.options, strict=False
            ):
                # Schedulers also add entries of their own, which no optimizer reads.
                group.update(
                    {key: value for key, value in options.items() if key in group}
                )

    def _before_step(self) -> None:
        self._set()
        settings = self.settings_of_steps.get(self.n)
        if settings is not None and settings.clip is not None:
            parameters: list[torch.Tensor] = []
            for group in self.optimizer.param_groups:
                parameters += group["params"]
            # By the norm of this stage alone; see :mod:`toolkit.runtime.pending_gradients`.
            clip_grad_norm_(parameters, settings.clip.max_norm, settings.clip.norm_type)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates."""
        return {"n": self.n}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after as many updates."""
        self.n = state["n"]
        self._set()

"""What a loop sets on its optimizer and gradients, noted for the updates of stages."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from toolkit.runtime.stage_optimizers import GroupOptions, options_of_group
from toolkit.runtime.step_optimizer import Clip, Settings


class LoopSettings:
    """Follows the options of a loop's optimizer, and its clipping, step by step.

    Only options that the loop has changed are handed to the optimizers of stages. Optimizers that
    count in their options would be set back by the others.

    Args:
        optimizer: that of the loop.

    Attributes:
        of_steps: the settings of recent training steps, by step.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.of_steps: dict[int, Settings] = {}
        self._optimizer = optimizer
        # Of each group, options as they were last looked at.
        self._base: list[GroupOptions] = []
        # (group, name) of those that have changed.
        self._followed: set[tuple[int, str]] = set()
        self._clip: Clip | None = None  # of the step that is under way
        self.note_base()

    def note_base(self, followed: Iterable[tuple[int, str]] = ()) -> None:
        """Take the present options for those of the stages; hand over the ``followed`` ones."""
        self._base = self._options()
        self._followed = {*followed}

    def extend_base(self) -> None:
        """Note the options of parameter groups that have been added."""
        self._base += self._options()[len(self._base) :]

    def changed_options(self) -> frozenset[tuple[int, str]]:
        """Return the options that the loop has ever changed, as (parameter group, name)."""
        options = self._options()
        for group, previous in enumerate(self._base):
            for name, value in options[group].items():
                if name in previous and not _differ(previous[name], value):
                    continue
                if name in previous and (group, name) not in self._followed:
                    self._complete_settings(group, name, previous[name])
                self._followed.add((group, name))
        self._base = options
        return frozenset(self._followed)

    def _complete_settings(self, group: int, name: str, value: Any) -> None:
        """Let the steps so far have the ``value`` of an option that the loop changes only now.

        Optimizers of stages that are made from now on begin with the new value, and predictions
        from late weights still use the old one.
        """
        for step, settings in self.of_steps.items():
            # The group may have been added after that step.
            if group < len(settings.options):
                options = [*settings.options]
                options[group] = {name: value, **options[group]}
                # A new object: the executor's threads may be reading the one before.
                self.of_steps[step] = replace(settings, options=options)

    def note(self, step: int, *, oldest: int, clips_as_before: bool) -> None:
        """Note the settings of ``step``, which begins; forget those before ``oldest``.

        Args:
            step: the training step.
            oldest: first step whose settings are still read.
            clips_as_before: whether the clipping of the step before counts, since updates may
                precede the loop's call.
        """
        self.changed_options()
        options: list[GroupOptions] = [{} for _ in self._base]
        for group, name in self._followed:
            if name in self._base[group]:
                options[group][name] = self._base[group][name]
        # An update that follows its sum at once may come before this step's call of
        # clip_grad_norm_.
        clip = None
        if clips_as_before:
            clip = self._clip
        self.of_steps[step] = Settings(options, clip)
        self._clip = None
        # A list: the dictionary loses entries on the way.
        for noted_step in [*self.of_steps]:
            if noted_step < oldest:
                del self.of_steps[noted_step]

    def note_clip(self, clip: Clip) -> None:
        """Note that the loop clips in the step under way."""
        self._clip = clip

    def clip_update(self, step: int) -> None:
        """Let the update of ``step`` clip as the loop has asked for in that step."""
        self.of_steps[step] = replace(self.of_steps[step], clip=self._clip)

    def _options(self) -> list[GroupOptions]:
        """Return a copy: a rate may be a tensor that is changed in place."""
        groups = [options_of_group(group) for group in self._optimizer.param_groups]
        return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), groups)


def _differ(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return not torch.equal(torch.as_tensor(before), torch.as_tensor(now))
    return bool(before != now)

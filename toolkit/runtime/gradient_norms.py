"""The norms of stages' gradients, by which updates clip them or skip what is not finite."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from toolkit.runtime.updater import GradientSum, Updater


class GradientNorm(NamedTuple):
    """Squared norm of a gradient, shape ``[]``, and whether the gradient is finite."""

    squared: Tensor
    is_finite: bool


def gradient_norms(
    updaters: "Sequence[Updater]", totals: "Sequence[GradientSum]"
) -> list[GradientNorm | None]:
    """Return the norm of each stage's gradient: that of the whole model with ``clip_by=model``.

    None where the stage has no gradient, or its options need no norm.

    Args:
        updaters: those of all stages.
        totals: for each stage, gradients summed over all micro-batches, times the loss's scale.
    """
    options = updaters[0].options
    squares: dict[int, Tensor] = {}  # by stage
    for stage, (updater, total) in enumerate(zip(updaters, totals, strict=True)):
        total.divide_by_count(updater.masters)
        names = [name for name in updater.masters if name in total.tensors]
        gradients = {name: total.tensors[name] for name in names}
        if gradients and options.needs_norm:
            if updater.sharded is not None:
                squared = updater.sharded.squared_norm(gradients)
            else:
                norms_of_weights = torch._foreach_norm([*gradients.values()])
                squared = torch.stack(norms_of_weights).square().sum()
            # Gradients have the factor on the loss, so that their squares have it twice.
            squares[stage] = squared / options.scale**2
    norms: list[GradientNorm | None] = [None] * len(updaters)
    if not squares:
        return norms
    # Squares add up over stages, norms do not; so all stages get the same norm, and are cut alike.
    if options.clip is not None and options.clip_by == "model":
        squares = dict.fromkeys(squares, torch.stack([*squares.values()]).sum())
    are_finite = [True] * len(squares)
    if options.scale != 1:
        # One question for all norms, once all are computed: reading a value waits for the device.
        are_finite = torch.stack([*squares.values()]).isfinite().tolist()
    for (stage, squared), is_finite in zip(squares.items(), are_finite, strict=True):
        norms[stage] = GradientNorm(squared, is_finite)
    return norms

"""What late weights do to a stage's gradient, and how far its weights move."""

from collections.abc import Mapping, Sequence
from math import nan

import torch
from torch import Tensor

from toolkit.runtime.microbatches import StageDelay
from toolkit.runtime.stage import StageRunner
from toolkit.runtime.updater import GradientSum, Weights


def compare_gradients(
    runner: StageRunner,
    step: int,
    staleness: Sequence[int],
    versions: Mapping[int, Weights],
    delayed: GradientSum,
    fresh: GradientSum,
) -> StageDelay:
    """Compare a stage's delayed gradient with that of the newest weights.

    Args:
        runner: the stage.
        step: the training step of both.
        staleness: steps by which the weights of each micro-batch are late.
        versions: the weight versions of the stage that are still there, by number.
        delayed: the gradient that the schedule sums, times the loss's scale.
        fresh: that of the newest weights of every stage on the same batch, likewise.
    """
    delayed_gradient = _flat_gradient(runner, delayed)
    fresh_gradient = _flat_gradient(runner, fresh)
    # Each float() waits for the device; only steps that measure do.
    delayed_norm = float(delayed_gradient.norm())
    fresh_norm = float(fresh_gradient.norm())
    cosine = nan
    if delayed_norm and fresh_norm:
        cosine = float(delayed_gradient @ fresh_gradient) / (delayed_norm * fresh_norm)
    # |theta_t| and |theta_t - theta_{t-1}|: how far one update moves the weights.
    newest = _flat(versions[step], runner.masters)
    moved = nan
    if step - 1 in versions:
        previous = _flat(versions[step - 1], runner.masters)
        moved = float((newest - previous).norm())
    return StageDelay(
        step=step,
        stage=runner.index,
        delay=sum(staleness) / len(staleness),
        cosine=cosine,
        gradient=delayed_norm,
        fresh_gradient=fresh_norm,
        weights=float(newest.norm()),
        moved=moved,
    )


def _flat_gradient(runner: StageRunner, total: GradientSum) -> Tensor:
    # Both factors on the loss are constants of the backward and no part of the gradient.
    total.divide_by_count(runner.masters)
    return _flat(total.tensors, runner.masters) / runner.options.scale


def _flat(tensors: Mapping[str, Tensor], names: Mapping[str, Tensor]) -> Tensor:
    """Return the named tensors as one, in double precision; missing ones count as 0."""
    flat_tensors = [
        tensors.get(name, torch.zeros_like(model_tensor)).flatten()
        for name, model_tensor in names.items()
    ]
    if not flat_tensors:
        return torch.zeros(1, dtype=torch.float64)
    return torch.cat(flat_tensors).double()

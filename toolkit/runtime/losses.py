"""Losses: the mean of a micro-batch, or a sum and the count by which a step divides it.

A mean over tokens weighs each micro-batch alike, however few valid tokens it has. A sum with its
count does not: the counts of all micro-batches travel with their gradients, and the update divides
by the total::

    theta_{t+1} = optimizer(theta_t, sum_m grad sum_m / sum_m count_m)
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from toolkit.errors import UserError
from toolkit.model.structure import Results
from toolkit.runtime.step_options import Loss, StepOptions

COUNT = "count of the loss"
"""Name of the count among the gradients of a stage; no parameter's name has a space."""

SUM_SCALE = 2.0**-10
"""Factor on a sum before its backward.

A sum over a thousand tokens has gradients a thousand times those of a mean, which 16 bits may not
hold. A power of two changes no digit of them.
"""


@dataclass(frozen=True)
class LossValue:
    """The loss of one micro-batch.

    Attributes:
        value: its mean loss, or with a ``count`` its sum; shape ``[]``.
        count: number of tokens or samples, or sum of weights, in ``value``; float64, shape ``[]``.
    """

    value: Tensor
    count: Tensor | None = None

    def mean(self) -> Tensor:
        """Return the mean loss, detached; 0 where nothing was counted."""
        value = self.value.detach()
        if self.count is None:
            return value
        return value / nonzero(self.count).to(value.dtype)

    def root(self, n_microbatches: int, scale: float) -> Tensor:
        """Return where the backward of this micro-batch begins.

        Args:
            n_microbatches: number of means in a training step.
            scale: factor on the loss, against underflow.
        """
        return self.value * self.root_factor(n_microbatches, scale)

    def root_factor(self, n_microbatches: int, scale: float) -> float:
        """Return :meth:`root` divided by ``value``."""
        # Gradients of all micro-batches only add up. Means have their 1/M here; sums are divided by
        # the total count at the update, when all counts have come.
        if self.count is None:
            return scale / n_microbatches
        return SUM_SCALE * scale


_EXAMINED_CALLS = 64  # of a loss

CheckedLoss = Callable[[Any, Tensor], LossValue]
"""From the tensors of the last stage, and targets."""


def loss_factor(
    count: Tensor | None, n_microbatches: int, scale: float
) -> Tensor | float:
    """Return :meth:`LossValue.root` of a micro-batch divided by its mean loss.

    Args:
        count: count of the loss, shape ``[]``; None for a mean.
        n_microbatches: number of means in a training step.
        scale: factor on the loss, against underflow.
    """
    if count is None:
        return scale / n_microbatches
    return nonzero(count) * (SUM_SCALE * scale)


def nonzero(count: Tensor) -> Tensor:
    """Return ``count``, or 1 where it is 0: nothing divided by nothing is nothing here."""
    return torch.where(count == 0, 1.0, count)


def as_count(count: Any, device: torch.device) -> Tensor:
    """Return a count as a float64 tensor of shape ``[]``; UserError for anything else."""
    if isinstance(count, Tensor) and count.numel() == 1:
        return count.detach().to(device, torch.float64).reshape(())
    if isinstance(count, Real):
        return torch.tensor(float(count), dtype=torch.float64, device=device)
    shape = list(count.shape) if isinstance(count, Tensor) else type(count).__name__
    raise UserError(
        f"count of the loss: got {shape}; expected a number, such as (targets != -100).sum()"
    )


class MeansOverSome(TorchFunctionMode):
    """Finds means that torch computes over targets while it ignores some.

    Attributes:
        seen: whether there has been one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Look at a call of a function of torch, and make it."""
        kwargs = kwargs or {}
        is_mean = kwargs.get("reduction", "mean") == "mean"
        if is_mean and func in (F.cross_entropy, F.nll_loss) and not self.seen:
            targets = args[1] if len(args) > 1 else kwargs.get("target")
            self.seen = _contains(targets, kwargs.get("ignore_index", -100))
        return func(*args, **kwargs)


def _contains(targets: Any, ignored_class: int) -> bool:
    """Whether targets on the CPU contain a class; False if they are not classes."""
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return False
    # On a GPU the look would wait for the device.
    if targets.device.type != "cpu":
        return False
    # In NumPy: a recording of operations, or a count of them, does not see the look.
    with torch._C.DisableTorchFunction():
        classes = targets.detach().numpy()
    return bool((classes == ignored_class).any())


def checked_loss(loss: Loss, options: StepOptions, results: Results) -> CheckedLoss:
    """Return ``loss`` of the last stage's tensors, in the context in which stages compute.

    Its result is checked. A tensor that it does not use gets a gradient of zeros, so that a
    parameter has a gradient in every runtime or in none. Means over some of the targets, which
    weigh micro-batches wrongly, are warned of if they are among the first.
    """
    counted_before: bool | None = None
    means = MeansOverSome()
    n_calls = 0

    def checked(outputs: Tensor | tuple[Tensor, ...], targets: Tensor) -> LossValue:
        nonlocal counted_before, n_calls
        if isinstance(outputs, Tensor):
            outputs = (outputs,)
        n_calls += 1
        # To examine a call costs microseconds: only the first are examined.
        examines = n_calls <= _EXAMINED_CALLS and not means.seen
        with options.autocast(outputs[0].device), means if examines else nullcontext():
            result = loss(results.restore(outputs), targets)
        if examines and means.seen:
            warnings.warn(
                "loss: got a mean over the targets that are not ignored, so a micro-batch with few"
                " of them counts as much as one with many; return their sum and their number:"
                ' (cross_entropy(..., reduction="sum"), (targets != -100).sum())',
                stacklevel=2,
            )
        value, count = _value_and_count(result)
        counted = count is not None
        # Messages have a place for the count or not, from the first one on.
        if counted_before not in (None, counted):
            raise UserError(
                "loss: got a mean from one micro-batch and a sum with its count from another;"
                " expected the same from all"
            )
        counted_before = counted
        if len(outputs) > 1:
            # Add a sum of no elements, 0, so that each tensor is used.
            for output in outputs:
                if output.requires_grad:
                    value = value + output[:0].sum().real.to(value.dtype)
        return LossValue(value, count)

    return checked


def _value_and_count(result: Any) -> tuple[Tensor, Tensor | None]:
    """Return the value of a loss, and its count or None; UserError if it is of another form."""
    has_count = isinstance(result, tuple | list) and len(result) == 2
    value, count = result if has_count else (result, None)
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(
            f'loss: got {shape}; expected a scalar. Use reduction="mean", or return a sum and'
            " its count"
        )
    if not has_count:
        return value, None
    return value, as_count(count, value.device)

"""The losses of all micro-batches of a step, in one call where the loss allows it.

A loss is a function of one micro-batch. Called for each of eight, it takes eight times as many
operations, and on a GPU small operations cost their launch. A separable loss has a second form,
which computes all micro-batches at once::

    @separable(squared_errors)
    def squared_error(outputs, targets):
        return (outputs - targets).square().mean()

    def squared_errors(outputs, targets, n_microbatches):
        errors = (outputs - targets).square()
        return errors.reshape(n_microbatches, -1).mean(1)

Both forms depend on their arguments alone, so a separable loss can be replayed by a CUDA graph. Any
other loss may read what the script changes, such as a weight that anneals: it is called each time.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit.model.structure import Results
from toolkit.runtime.losses import CheckedLoss, LossValue
from toolkit.runtime.stage import Values
from toolkit.runtime.step_options import Loss, StepOptions

AllLosses = Callable[..., Any]
"""From outputs, targets and the number of micro-batches to their losses, ``[n]``, or to
``(sums, counts)``, ``[n]`` each."""

LossFunction = TypeVar("LossFunction", bound=Callable[..., Any])

_ATTRIBUTE = "of_all_microbatches"
_EXAMINED = 64  # micro-batches whose loss is examined on the CPU


def separable(of_all_microbatches: AllLosses) -> Callable[[LossFunction], LossFunction]:
    """Mark a loss that can be computed for all micro-batches of a step in one call.

    Args:
        of_all_microbatches: function from outputs and targets, ``[n * b, ...]`` each, and n to
            what the loss returns for each micro-batch: means ``[n]``, or a pair of sums and
            counts, ``[n]`` each. It takes the loss's keyword arguments, too, and reads nothing but
            its arguments.

    Returns:
        A decorator, which returns the loss itself.
    """

    def mark(loss: LossFunction) -> LossFunction:
        # See :func:`all_losses`, which compares the two.
        # With the loss itself: functools.wraps copies the mark to functions that compute otherwise.
        vars(loss)[_ATTRIBUTE] = loss, of_all_microbatches
        return loss

    return mark


def cross_entropies(
    outputs: Tensor,
    targets: Tensor,
    n_microbatches: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return torch's mean cross-entropy of each micro-batch, ``[n_microbatches]``.

    Args:
        outputs: scores, ``[n * b, classes, ...]``.
        targets: classes, ``[n * b, ...]``; or probabilities, shaped as ``outputs``.
        n_microbatches: n.
        ignore_index: class that does not count.
        label_smoothing: share of the target that is spread over all classes.
    """
    values = F.cross_entropy(
        outputs,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    by_microbatch = values.reshape(n_microbatches, -1)
    if targets.is_floating_point():
        return by_microbatch.mean(1)
    # torch's "mean" divides by the targets that are not ignored; its "none" gives 0 for the others.
    n_valid = (targets != ignore_index).reshape(n_microbatches, -1).sum(1)
    return by_microbatch.sum(1) / n_valid


def _squared_errors(outputs: Tensor, targets: Tensor, n_microbatches: int) -> Tensor:
    if outputs.shape != targets.shape:
        # They are broadcast, which must not mix the samples of several micro-batches.
        chunks = zip(
            outputs.chunk(n_microbatches), targets.chunk(n_microbatches), strict=True
        )
        return torch.stack([F.mse_loss(output, target) for output, target in chunks])
    errors = F.mse_loss(outputs, targets, reduction="none")
    return errors.reshape(n_microbatches, -1).mean(1)


_OF_TORCH: dict[Callable[..., Any], AllLosses] = {
    F.cross_entropy: cross_entropies,
    F.mse_loss: _squared_errors,
}
_OPTIONS = {"ignore_index", "label_smoothing"}


def all_losses(loss: Loss) -> tuple[AllLosses, tuple[Any, ...]] | None:
    """Return the form of ``loss`` for all micro-batches; None if it is not separable.

    With it come the values of the options that the form computes with now, to compare with later.
    """
    options: dict[str, Any] = {}
    # A partial with positional arguments would take the places of outputs and targets.
    while isinstance(loss, partial) and not loss.args:
        options = loss.keywords | options  # those of the outer partial count
        loss = loss.func
    marked, of_all = getattr(loss, _ATTRIBUTE, (None, None))
    if marked is not loss:
        of_all = None
    # By exact type: a subclass may compute something else. Class weights change the divisor.
    plain_mean = getattr(loss, "reduction", None) == "mean"
    if type(loss) is nn.CrossEntropyLoss and plain_mean and loss.weight is None:
        options = {name: getattr(loss, name) for name in _OPTIONS}
        of_all = cross_entropies
    elif type(loss) is nn.MSELoss and plain_mean:
        of_all = _squared_errors
    elif (
        # A callable object need not be hashable; to look one up that is not would raise TypeError.
        isinstance(loss, Hashable) and loss in _OF_TORCH and options.keys() <= _OPTIONS
    ):
        of_all = _OF_TORCH[loss]
    if of_all is None or not all(map(_is_plain, options.values())):
        return None
    return partial(of_all, **options), tuple(sorted(options.items()))


def _is_plain(value: Any) -> bool:
    """Whether an option can be compared with what it is later."""
    return isinstance(value, Hashable) and not isinstance(value, Tensor)


class MicrobatchLosses:
    """Computes the losses of all micro-batches of a step.

    Args:
        loss: the user's loss.
        checked: the same as :func:`toolkit.runtime.losses.checked_loss` returns it.
        options: how stages compute.
        results: what the model returns.
    """

    def __init__(
        self, loss: Loss, checked: CheckedLoss, options: StepOptions, results: Results
    ) -> None:
        self._loss = loss
        self._checked = checked
        self._options = options
        # With several tensors, or a scalar, only the loss itself knows what belongs together.
        self._is_single_tensor = results.is_single_tensor
        self._n_examined = 0  # micro-batches

    def in_one_call(self) -> tuple[AllLosses, tuple[Any, ...]] | None:
        """Return :func:`all_losses` if all losses of a step take one call; else None."""
        if not self._is_single_tensor:
            return None
        return all_losses(self._loss)

    def examine(self, outputs: Values, targets: Tensor, n_microbatches: int) -> None:
        """Refuse a loss that is none, and warn of means over some of the targets.

        The one call for all micro-batches does neither. Only the first calls are examined.
        """
        # On a GPU the targets are not looked at: one micro-batch shows whether this is a loss.
        limit = 1
        if targets.device.type == "cpu":
            limit = _EXAMINED
        if self._n_examined < limit and self.in_one_call():
            with torch.no_grad():
                self._one_by_one(outputs, targets, n_microbatches)
            self._n_examined += n_microbatches

    def __call__(
        self, outputs: Values, targets: Tensor, n_microbatches: int
    ) -> LossValue:
        """Return the losses of the micro-batches, and their counts if it has some, ``[n]`` each.

        Args:
            outputs: what the last stage returns, ``[n_microbatches * b, ...]`` each.
            targets: ``[n_microbatches * b, ...]``.
            n_microbatches: n.
        """
        form = self.in_one_call()
        if form is None:
            return self._one_by_one(outputs, targets, n_microbatches)
        of_all, _ = form
        with self._options.autocast(outputs[0].device):
            losses = of_all(outputs[0], targets, n_microbatches)
        if isinstance(losses, Tensor):
            return LossValue(losses)
        sums, counts = losses
        return LossValue(sums, counts.detach().to(torch.float64))

    def _one_by_one(
        self, outputs: Values, targets: Tensor, n_microbatches: int
    ) -> LossValue:
        chunks = zip(*(output.chunk(n_microbatches) for output in outputs), strict=True)
        pairs = zip(chunks, targets.chunk(n_microbatches), strict=True)
        losses = [self._checked(output, target) for output, target in pairs]
        counts = [loss.count for loss in losses if loss.count is not None]
        values = torch.stack([loss.value for loss in losses])
        if not counts:
            return LossValue(values)
        return LossValue(values, torch.stack(counts))

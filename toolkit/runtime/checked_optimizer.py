"""Makes the user's optimizer and learning-rate schedule of a stage, and checks their steps."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from toolkit.errors import UserError
from toolkit.runtime.make_optimizer import MakeOptimizer, MakeScheduler, takes_names


def make_checked(
    parameters: Mapping[str, nn.Parameter],
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
) -> tuple[Optimizer | None, LRScheduler | None]:
    """Return the optimizer of ``parameters``, and its learning-rate schedule, if any.

    Both are None without parameters: torch's optimizers refuse an empty list.

    Raises:
        UserError: one has no ``step`` that can be called without arguments.
    """
    if not parameters:
        return None, None
    values: list[Any] = [*parameters.values()]
    if takes_names(make_optimizer):
        values = [*parameters.items()]
    optimizer = make_optimizer(values)
    _check_step(optimizer, "optimizer", "such as torch.optim.SGD or AdamW")
    if make_scheduler is None:
        return optimizer, None
    scheduler = make_scheduler(optimizer)
    _check_step(scheduler, "lr_scheduler", "that counts steps, such as LambdaLR")
    return optimizer, scheduler


def _check_step(stepper: Optimizer | LRScheduler, name: str, way_out: str) -> None:
    """Raise UserError if ``step`` is missing or needs an argument.

    LBFGS needs a closure that repeats the forward; ReduceLROnPlateau needs a loss.
    """
    try:
        inspect.signature(stepper.step).bind()
    except (AttributeError, TypeError) as error:
        kind = type(stepper).__name__
        raise UserError(
            f"{name}: got {kind}, whose step is {error}; return one {way_out}"
        ) from error

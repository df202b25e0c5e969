"""How a user says what the optimizer of a stage is: a function of its parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

MakeOptimizer = Callable[[list[Any]], Optimizer]
"""Makes the optimizer of a stage from the list of its parameters or, :func:`by_name`, of pairs."""
MakeScheduler = Callable[[Optimizer], LRScheduler]

Maker = TypeVar("Maker", bound=Callable[..., Optimizer])


def by_name(make: Maker) -> Maker:
    """Mark an optimizer function that takes pairs of name and parameter.

    Names are those of the whole model, so the function can form parameter groups::

        @by_name
        def optimizer(parameters):
            decayed = [p for name, p in parameters if "norm" not in name]
            others = [p for name, p in parameters if "norm" in name]
            return AdamW([{"params": decayed}, {"params": others, "weight_decay": 0}])

    Args:
        make: function from a list of ``(name, parameter)`` to an optimizer.

    Returns:
        ``make`` itself, marked.
    """
    vars(make)["takes_names"] = True
    return make


def takes_names(make: Callable[..., Optimizer]) -> bool:
    """Whether ``make``, or the function it is a partial of, is marked :func:`by_name`."""
    # The mark is an attribute, and a partial does not pass those of its function on.
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "takes_names", False)

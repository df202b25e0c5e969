"""The check of an optimizer's options, in the words of the options."""

import re
from collections.abc import Mapping
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from toolkit.errors import UserError, first_line
from toolkit.runtime.make_optimizer import MakeOptimizer, takes_names

# What torch's errors call the options of its optimizers, where it is not their name.
_WORDS_OF_TORCH = {"learning rate": "lr", "beta parameter": "betas", "epsilon": "eps"}


def check_optimizer(make: MakeOptimizer) -> Optimizer:
    """Return an optimizer of one number, which is built to check it.

    Args:
        make: function that makes optimizers of parameters.

    Raises:
        UserError: it cannot be made, or its rate or momentum is out of range.
    """
    try:
        parameter = nn.Parameter(torch.zeros(1))
        optimizer = make([("weight", parameter)] if takes_names(make) else [parameter])
    except (TypeError, ValueError, IndexError) as error:
        reason = first_line(error)
        option_name = _option_in(reason, getattr(make, "keywords", {}))
        hint = f"; it is optimizer.{option_name}" if option_name else ""
        raise UserError(f"optimizer cannot be made: {reason}{hint}") from error
    momentum = optimizer.param_groups[0].get("momentum", 0)
    if isinstance(momentum, int | float) and momentum >= 1:
        raise UserError(
            f"optimizer.momentum is below 1, since past gradients would never fade: got {momentum}"
        )
    learning_rate = optimizer.param_groups[0]["lr"]
    if not (isinstance(learning_rate, int | float) and isfinite(learning_rate)):
        raise UserError(f"optimizer.lr is a number: got {learning_rate!r}")
    return optimizer


def _option_in(reason: str, options: Mapping[str, Any]) -> str | None:
    """Return the option of an optimizer that one of torch's messages is about; None if unclear."""
    for words, name in _WORDS_OF_TORCH.items():
        if words in reason and name in options:
            return name
    # Longer names first, since one may begin with another:
    # momentum_decay before momentum.
    for name in sorted(options, key=len, reverse=True):
        if re.search(rf"\b{re.escape(name)}\b", reason):
            return name
    return None

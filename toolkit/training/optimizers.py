"""Optimizers for large batches, from timm, which loads when one of them is made.

Both adapt the rate of each parameter tensor to its norm, and look at no other: so an optimizer for
each stage makes the updates of one for the whole model. LAMB's ``max_grad_norm`` is the exception.
"""

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer


def lars(params: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    """timm's Lars, of You et al., arXiv 1708.03888.

    Raises:
        ValueError: timm is not installed.
    """
    return _timm("lars").Lars(params, **options)


def lamb(
    params: Iterable[nn.Parameter],
    betas: Iterable[float] = (0.9, 0.999),
    max_grad_norm: float | None = None,
    **options: Any,
) -> Optimizer:
    """timm's Lamb, of You et al., arXiv 1904.00962; it clips only if told to.

    Raises:
        ValueError: timm is not installed.
    """
    return _timm("lamb").Lamb(params, betas=tuple(betas), max_grad_norm=max_grad_norm, **options)


def _timm(optimizer: str) -> ModuleType:
    try:
        from timm import optim
    except ImportError as error:
        raise ValueError(f"optimizer={optimizer} needs timm: pip install timm ({error})") from error
    return optim

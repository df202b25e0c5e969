"""Optimizers beside torch's: those for large batches, from timm, and Muon.

Each looks at one parameter tensor at a time, so an optimizer for each stage makes the updates of
one for the whole model. LAMB's ``max_grad_norm`` is the exception. timm loads when it is needed.
"""

import re
from collections.abc import Collection, Iterable
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from toolkit.errors import UserError
from toolkit.runtime import by_name
from toolkit.training.muon import Muon

OUTER = ("embed", "head", "fc", r"^conv1\.", r"^conv_proj\.")
"""The first and the last layers of the models of the zoo, by patterns of their names."""


def lars(params: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    """timm's Lars, of You et al., arXiv 1708.03888.

    Raises:
        UserError: timm is not installed.
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
        UserError: timm is not installed.
    """
    return _timm("lamb").Lamb(params, betas=tuple(betas), max_grad_norm=max_grad_norm, **options)


@by_name
def muon(
    parameters: Iterable[tuple[str, nn.Parameter]],
    adamw: Collection[str] = OUTER,
    betas: Iterable[float] = (0.9, 0.95),
    **options: Any,
) -> Optimizer:
    """:class:`~toolkit.training.muon.Muon`, and AdamW for what is no matrix of a hidden layer.

    Args:
        parameters: with their names.
        adamw: patterns of the names of those that are matrices and yet AdamW's, as the first and
            the last layer are to be: regular expressions, found anywhere in a name.
        betas: of AdamW.
        options: those of Muon.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in parameters:
        vector = sum(size > 1 for size in parameter.shape) < 2
        outer = vector or any(re.search(pattern, name) for pattern in adamw)
        groups[not outer].append(parameter)
    return Muon(
        [{"params": params, "orthogonal": hidden} for hidden, params in groups.items() if params],
        betas=tuple(betas),
        **options,
    )


def _timm(optimizer: str) -> ModuleType:
    try:
        from timm import optim
    except ImportError as error:
        raise UserError(f"optimizer={optimizer} needs timm: pip install timm ({error})") from error
    return optim

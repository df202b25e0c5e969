"""Models as stages: models of one form are analysed once, since that is slow."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from toolkit.model import Stages, partition

_CUT: dict[tuple, Stages] = {}


def cut(
    model: nn.Module,
    n_stages: int,
    example: torch.Tensor,
    by: str | Sequence[str] = "flops",
    *,
    check: bool = True,
) -> Stages:
    """As :func:`toolkit.model.partition`, with this model's modules and weights."""
    parameters = tuple((p.dtype, p.device, p.requires_grad) for p in model.parameters())
    modules = tuple((type(module), module.training) for module in model.modules())
    inputs = tuple(example.shape), example.dtype, example.device
    form = repr(model), parameters, modules, n_stages, inputs, str(by)
    if form not in _CUT:
        _CUT[form] = partition(copy.deepcopy(model), n_stages, example, by, check=check)
    theirs, own = _parts(_CUT[form].model), _parts(model)
    memo = {id(their): part for their, part in zip(theirs, own, strict=True)}
    return copy.deepcopy(_CUT[form], memo)


def _parts(model: nn.Module) -> list:
    return [*model.modules(), *model.parameters(), *model.buffers()]

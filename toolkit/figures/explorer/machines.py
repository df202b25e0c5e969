"""What schedules are simulated on: hardware, and the costs of stages."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from toolkit.cost import UNIT, Hardware, StageCost, profile, unit_costs
from toolkit.cost.hardware import presets
from toolkit.errors import UserError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from toolkit.model import InputSpec

UNIFORM = "uniform"
GIVEN = "given"
IMAGE_MODELS = ("resnet18", "resnet50", "vit_b_16")
_SAMPLES = 8  # of a micro-batch

Costs = Callable[[int], Sequence[StageCost]]
"""From the number of stages to what each costs."""


def hardware_presets() -> dict[str, Hardware]:
    """By name: the unit machine, and those of conf/hardware; a warning where that is missing."""
    try:
        return {"unit": UNIT} | presets()
    except ValueError as missing:
        warnings.warn(f"the explorer offers the unit machine alone: {missing}", stacklevel=2)
        return {"unit": UNIT}


def cost_sources() -> dict[str, Costs]:
    """By name: uniform stages, and those of models profiled on meta tensors."""
    images = {
        f"{name}, {_SAMPLES} images": _made(partial(_of_images, name)) for name in IMAGE_MODELS
    }
    return {UNIFORM: unit_costs, **images, f"gpt2, {_SAMPLES} sequences": _made(_gpt2)}


def given(costs: Sequence[StageCost]) -> Costs:
    """Costs that are known, for one number of stages; simulation refuses others."""
    return lambda n_stages: costs


def profiled(model: "nn.Module", example: "Tensor | tuple[Tensor, ...] | None") -> Costs:
    """Those of ``model``, cut and profiled when they are first asked for.

    They raise a ValueError if it cannot be traced, cut or run.
    """
    from toolkit.model import partition

    known: dict[int, Sequence[StageCost]] = {}

    def costs(n_stages: int) -> Sequence[StageCost]:
        if example is None:
            raise UserError("a model is profiled on an example: give a micro-batch, example=...")
        if n_stages not in known:
            try:
                stages = partition(model, n_stages, example)
                known[n_stages] = profile(stages, example)
            except ValueError:
                raise
            except Exception as error:  # the model's own code may raise anything
                who = type(model).__name__
                raise UserError(f"{who} cannot be profiled: {first_line(error)}") from error
        return known[n_stages]

    return costs


def _made(make: "Callable[[], tuple[nn.Module, InputSpec]]") -> Costs:
    """Those of a model that is made, on the meta device, when they are first asked for."""
    made: list[Costs] = []

    def costs(n_stages: int) -> Sequence[StageCost]:
        import torch

        if not made:
            with torch.device("meta"):
                model, form = make()
            made.append(profiled(model, form.example(_SAMPLES, "meta")))
        return made[0](n_stages)

    return costs


def _of_images(name: str) -> "tuple[nn.Module, InputSpec]":
    from toolkit.model import Images, build

    return build(name), Images(3, 224, 224, 1000)


def _gpt2() -> "tuple[nn.Module, InputSpec]":
    from toolkit.model import Sequences, gpt

    form = Sequences(1024, 50257)
    return gpt(**form.arguments, layers=12, width=768, heads=12), form

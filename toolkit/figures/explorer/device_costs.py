"""Costs of the models on offer on one device of a rank, and the machines as it sees them."""

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from toolkit.cost import Hardware
from toolkit.cost.worker_forms import ModelCosts
from toolkit.errors import UserError
from toolkit.model import Images, build

if TYPE_CHECKING:
    from toolkit.cost.tensor_width import Width

BATCH = 32  # images of a micro-batch, unless chosen


def model_costs(
    model: str,
    batch: int = BATCH,
    n_devices: int = 1,
    machine: Hardware | None = None,
) -> ModelCosts:
    """Return the costs of a model of the zoo on one device of a rank.

    Args:
        model: its name.
        batch: images of 224 x 224 pixels in a micro-batch.
        n_devices: devices of a rank.
        machine: the machines; if a rank has several devices, their links count.

    Raises:
        UserError: several devices cannot share the model, or are not alike.
    """
    # Costs of one device depend on no machine: they are found once for all.
    if machine is None or n_devices == 1:
        return _model_costs(model, batch, None)
    return _model_costs(model, batch, _width(machine, n_devices))


@lru_cache(maxsize=16)
def _model_costs(model: str, batch: int, width: "Width | None") -> ModelCosts:
    images = Images(3, 224, 224, 1000)
    # Shapes are enough for the analysis, and weights would take seconds to draw.
    with torch.device("meta"):
        model_on_meta = build(model, **images.arguments)
    return ModelCosts(model_on_meta, images.example(batch, "meta"), width=width)


def hardware_of_ranks(machine: Hardware, n_devices: int) -> Hardware:
    """Return the machines as one of the ``n_devices`` of each rank sees them."""
    if n_devices == 1:
        return machine
    return _width(machine, n_devices).hardware_of_ranks


def _width(machine: Hardware, n_devices: int) -> "Width":
    # Only here: to import torch's DTensors takes seconds.
    from toolkit.cost.tensor_width import Width

    return Width(n_devices, machine)


def check_width(n_devices: int, *, has_model: bool) -> None:
    """Raise UserError if ranks have several devices without a model that these could share."""
    if n_devices > 1 and not has_model:
        raise UserError(
            f"width={n_devices} shares the stages of a model: choose the costs of one, such as"
            " vit_b_16"
        )

"""Training runs whose ranks are several devices."""

from collections.abc import Callable
from typing import Any

from torch import nn

from toolkit.errors import UserError
from toolkit.options import SaveOptions


def options_of_width(
    runtime: Callable[..., Any],
    model: nn.Module,
    save: SaveOptions,
    label_smoothing: float = 0.0,
) -> dict[str, Any]:
    """Return the further options of a runtime whose ranks are several devices.

    Args:
        runtime: class of the runtime, or a partial of it that may set ``width``.
        model: the model, whose stages devices share.
        save: when checkpoints are saved.
        label_smoothing: of the loss. torch's ``loss_parallel`` has none, so scores are whole then.

    Raises:
        UserError: the model has no plan for that width, or every rank writes its share.
    """
    width = getattr(runtime, "keywords", {}).get("width", 1)
    if width == 1:
        return {}
    if save.sharded:
        raise UserError(
            f"save.sharded=true with runtime.width={width} would write each share from several"
            " devices: leave it out"
        )
    # Only here: to import torch's DTensors takes a second.
    from toolkit.model.tensor_parallel import tensor_parallel

    return {
        "parallelize": tensor_parallel(model, width, share_loss=not label_smoothing)
    }

"""The devices of a training run: the one of a process, or several that share a rank."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit.errors import UserError, first_line
from toolkit.options import SaveOptions

if TYPE_CHECKING:
    from toolkit.model.tensor_parallel import Parallelize


def pick_device(name: str) -> torch.device:
    """Return the device to train on.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1``, ...; ``auto`` is CUDA if available, otherwise the CPU.

    Raises:
        UserError: this machine lacks the device, or it cannot train.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # torch.device("cuda:7") exists without such a GPU; memory on it does not.
        torch.empty(0, device=device)
    except (ImportError, RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0]
        if len(reason) > 60:  # torch's lists of backends
            reason = "this build of torch has no such device"
        raise UserError(
            f"device={name} cannot be used: {reason}; try device=auto"
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} cannot train: it is auto, cpu, cuda or cuda:1")
    return device


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
        label_smoothing: of the loss. torch's ``loss_parallel`` has no smoothing: scores stay whole.

    Raises:
        UserError: the devices cannot share the model, or every rank writes its share.
    """
    width = getattr(runtime, "keywords", {}).get("width", 1)
    if width == 1:
        return {}
    if save.sharded:
        raise UserError(
            f"save.sharded=true with runtime.width={width} would write each share from several"
            " devices: leave it out"
        )
    return {"parallelize": plan_of_width(model, width, label_smoothing)}


def plan_of_width(
    model: nn.Module, width: int, label_smoothing: float = 0.0
) -> "Parallelize":
    """Return the function by which ``width`` devices share the stages of a training run.

    Args:
        model: the model.
        width: number of devices.
        label_smoothing: of the loss.

    Raises:
        UserError: the devices cannot share the model.
    """
    # Only here: to import torch's DTensors takes a second.
    from toolkit.model.tensor_parallel import default_parallelize

    return default_parallelize(model, width, share_loss=not label_smoothing)

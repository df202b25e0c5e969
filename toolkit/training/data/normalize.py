"""Bytes on the training device, and the floats that a model sees."""

from typing import Any

import torch
from torch import Tensor


class Placed:
    """Tensors, moved to each device once."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = tensors
        self._copies: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._copies:
            self._copies[device] = tuple(tensor.to(device) for tensor in self._tensors)
        return self._copies[device]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_copies": {}}


class Normalise:
    """Bytes ``[n, channels, height, width]`` as floats, where they are.

    Args:
        mean, std: of each channel, black being 0 and white 1.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._constants = Placed(*(torch.tensor(c).view(1, -1, 1, 1) for c in (mean, std)))

    def __call__(self, pixels: Tensor) -> Tensor:
        mean, std = self._constants.on(pixels.device)
        return pixels.float().div_(255).sub_(mean).div_(std)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on ``device``, without waiting for what that is doing."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)

"""A clock for work on any device."""

import time

import torch


def now(device: torch.device) -> float:
    """Seconds by the performance counter, once ``device`` has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

"""Fair timing on a noisy machine: methods take turns."""

from collections.abc import Callable, Mapping

import torch
from tqdm import tqdm

from toolkit.cost.stage_costs import synchronized_time


def alternate(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Seconds of each call: ``rounds`` of each method, in turn, after ``warm_up`` uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for k in tqdm(range(-warm_up, rounds), unit="round", leave=False):
        for name, method in methods.items():
            start = synchronized_time(device)
            method()
            if k >= 0:
                seconds[name].append(synchronized_time(device) - start)
    return seconds

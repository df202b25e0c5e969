"""Fair timing on a noisy machine: methods take turns, medians and paired ratios are quoted."""

from collections.abc import Callable, Mapping
from statistics import median

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


def ratio_cells(seconds: list[float], baseline: list[float], digits: int = 3) -> dict[str, float]:
    """Median, smallest and largest ratio, round by round."""
    found = [mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)]
    cells = {"ratio": median(found), "ratio_min": min(found), "ratio_max": max(found)}
    return {name: round(value, digits) for name, value in cells.items()}

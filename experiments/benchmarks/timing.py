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
    for counted in tqdm([False] * warm_up + [True] * rounds, unit="round", leave=False):
        for name, method in methods.items():
            taken = _timed(method, device)
            if counted:
                seconds[name].append(taken)
    return seconds


def ratios(seconds: list[float], baseline: list[float]) -> tuple[float, float, float]:
    """Smallest, median and largest ratio, round by round."""
    found = [mine / theirs for mine, theirs in zip(seconds, baseline, strict=True)]
    return min(found), median(found), max(found)


def _timed(method: Callable[[], object], device: torch.device) -> float:
    start = synchronized_time(device)
    method()
    return synchronized_time(device) - start

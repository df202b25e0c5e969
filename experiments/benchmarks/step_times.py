"""Times of steps: of methods in turn, of ranks, and their ratios."""

import gc
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from toolkit.cost.stage_seconds import synchronized_time

if TYPE_CHECKING:
    # To time what needs no runtime must not load them.
    from toolkit.runtime import World


def alternate(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Return the seconds of ``rounds`` calls of each method, in turn, after ``warm_up`` others."""
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for round_number in tqdm(range(-warm_up, rounds), unit="round", leave=False):
        for name, method in methods.items():
            # Otherwise a method may pay for the garbage of the one before.
            gc.collect()
            start = synchronized_time(device)
            method()
            if round_number >= 0:
                seconds[name].append(synchronized_time(device) - start)
    return seconds


def ratios(seconds: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Return the ratios of two methods, round by round."""
    return [first / second for first, second in zip(seconds, baseline, strict=True)]


def mean_step(moments: Sequence[float], skip: int) -> float:
    """Return the mean seconds of a step after step ``skip``, from the ends of all steps."""
    # From end to end: with late weights a step begins before the one before it has ended.
    return (moments[-1] - moments[skip]) / (len(moments) - 1 - skip)


def job_steps(world: "World", moments: Sequence[float]) -> list[float]:
    """Return the seconds from one step of all ranks to the next. Every rank calls it.

    Args:
        world: the ranks.
        moments: when steps of this rank ended, by time.monotonic(), which ranks of a machine share.
    """
    # A step has ended when its last rank has: a rank alone may be ahead of the others.
    last_ends = [max(ends) for ends in zip(*world.gather(moments), strict=True)]
    return [end - begin for begin, end in pairwise(last_ends)]

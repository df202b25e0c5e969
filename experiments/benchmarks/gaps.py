"""The longest gaps on a device's timeline, in training steps of plain PyTorch and order "grouped".

    stream 1   [ kernel a ]      [ kernel c ]
    stream 2        [ kernel b ]                 [ kernel d ]
    gap                                     |----|              after c, before d

The device idles in a gap: no stream runs a kernel. On a CPU, an operation counts as a kernel.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from omegaconf import DictConfig
from torch import profiler
from torch.autograd import DeviceType
from tqdm import tqdm

from benchmarks.training_steps import WARM_UP, Setting
from toolkit.cli.check_options import check_counts
from toolkit.cost.stage_seconds import synchronized_time
from toolkit.errors import UserError

_COUNTS = ("image_size", "microbatches", "stages", "batch", "steps", "longest")


class Interval(NamedTuple):
    """A kernel, from its start to its end in microseconds."""

    name: str
    start: float
    end: float


class Gap(NamedTuple):
    """A time in which no kernel runs, in microseconds, between two kernels."""

    microseconds: float
    before: str
    after: str


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each of the longest gaps of each method.

    *step*: microseconds from the first kernel to the last one, by step. *idle*: share of this time
    in which no kernel runs.
    """
    check_counts(config, *_COUNTS, of="bench.")
    setting = Setting.of(config, device, seed)
    methods: dict[str, Callable[[], Any]] = {
        "plain PyTorch": setting.plain,
        "DP grouped": setting.data_parallel,
        "CDP-v2 grouped": setting.cyclic,
    }
    rows: list[dict[str, Any]] = []
    for name, build_method in tqdm(methods.items(), unit="method", leave=False):
        method = build_method()
        run_step = partial(method.step, setting.inputs, setting.targets)
        intervals = record(run_step, config.steps, device)
        gaps = gaps_between(intervals)
        step = total_time(intervals) / config.steps
        for gap in sorted(gaps, key=attrgetter("microseconds"), reverse=True)[
            : config.longest
        ]:
            rows.append(
                {
                    "method": name,
                    "gap (us)": round(gap.microseconds, 1),
                    "before": gap.before,
                    "after": gap.after,
                    "step (us)": round(step, 1),
                    "kernels": round(len(intervals) / config.steps),
                    "idle (%)": round(100 * idle_share(intervals), 1),
                }
            )
    return rows


def record(
    step: Callable[[], object], n_steps: int, device: torch.device
) -> list[Interval]:
    """Return the kernels of ``n_steps`` steps in a row, after some that are not recorded."""
    on_gpu = device.type == "cuda"
    for _ in range(WARM_UP):
        step()
    # On a GPU its own activity alone: recording operations would delay launches, and add gaps.
    activity = (
        profiler.ProfilerActivity.CUDA if on_gpu else profiler.ProfilerActivity.CPU
    )
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or it writes into the progress bar
    synchronized_time(device)
    with profiler.profile(activities=[activity], acc_events=True) as profile:
        for _ in range(n_steps):
            step()
        synchronized_time(device)
    device_type = DeviceType.CUDA if on_gpu else DeviceType.CPU
    intervals = [
        Interval(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        # An annotation, such as that of an optimizer's step, covers gaps.
        if event.device_type == device_type and not event.is_user_annotation
    ]
    if not intervals:
        raise UserError(
            f"torch.profiler recorded no kernel on {device}; is CUPTI installed?"
        )
    return intervals


def gaps_between(intervals: Iterable[Interval]) -> list[Gap]:
    """Return the gaps between intervals that may overlap or contain others, in order of time."""
    # Of those that start together the longest comes first: it contains the others.
    ordered = sorted(intervals, key=lambda interval: (interval.start, -interval.end))
    gaps: list[Gap] = []
    latest: Interval | None = None  # the interval that ends last so far
    for interval in ordered:
        if latest is not None and interval.start > latest.end:
            gaps.append(Gap(interval.start - latest.end, latest.name, interval.name))
        if latest is None or interval.end > latest.end:
            latest = interval
    return gaps


def total_time(intervals: Iterable[Interval]) -> float:
    """Return the microseconds from the first start to the last end."""
    starts = [interval.start for interval in intervals]
    ends = [interval.end for interval in intervals]
    return max(ends) - min(starts)


def idle_share(intervals: list[Interval]) -> float:
    """Return the share of :func:`total_time` in which no interval runs."""
    idle = sum(gap.microseconds for gap in gaps_between(intervals))
    return idle / total_time(intervals) if idle else 0.0

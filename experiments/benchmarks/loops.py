"""A training loop around CyclicDataParallel, against the runtime and torch's own wrapper."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from benchmarks.step_times import ratios
from benchmarks.training_steps import N_CLASSES, momentum_sgd, random_images
from toolkit.cli.check_options import check_counts
from toolkit.model import build, partition
from toolkit.runtime import CyclicDataParallel, Distributed, World, join, launch
from toolkit.schedule import ScheduleSpec

RULES = ("dp", "cdp_v1", "cdp_v2")

Run = Callable[[int], Iterator[Any]]
"""Carries out training steps, and yields after each."""


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """Return a row for each rule: the median seconds of a step, and median ratios of rounds.

    *start*: seconds from the first call to the first result of a step.
    """
    check_counts(
        config, "image_size", "workers", "batch", "rounds", "steps", of="bench."
    )
    return launch(measure, config.workers, dict(config), device.type, seed)[0]


def measure(options: dict[str, Any], device: str, seed: int) -> list[dict[str, Any]]:
    """Time every way to train, in turn; on each rank."""
    world = join(device="cpu" if device == "cpu" else "auto")
    torch.manual_seed(seed)
    n, size = world.size, options["image_size"]
    inputs, targets = random_images(n * options["batch"], size, world.device)
    make = partial(build, options["model"], N_CLASSES, size)
    x = inputs.chunk(n)[world.rank]
    y = targets.chunk(n)[world.rank]
    ways: dict[str, Run] = {"DDP": _ddp(make().to(world.device), x, y)}
    for rule in RULES:
        ways[f"{rule} in a loop"] = _loop(make().to(world.device), rule, x, y)
        ways[rule] = _runtime(make().to(world.device), rule, world, inputs, targets)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    start_seconds: dict[str, float] = {}
    for _ in range(options["rounds"]):
        # All ways in each round, so that other work of the machine meets all of them.
        for name, way in ways.items():
            world.barrier()
            moments = [time.perf_counter()]
            moments += [time.perf_counter() for _ in way(options["steps"])]
            # Of the first round: later ones find models that are traced already.
            start_seconds.setdefault(name, moments[1] - moments[0])
            # Entry 0 is the begin, before any step; the first quarter of the steps is not timed.
            n_skipped = 1 + options["steps"] // 4
            timed = pairwise(moments[n_skipped:])
            seconds[name].append(median(end - begin for begin, end in timed))
    return [_row(rule, seconds, start_seconds) for rule in RULES]


def _row(
    rule: str, seconds: dict[str, list[float]], start_seconds: dict[str, float]
) -> dict[str, Any]:
    loop = seconds[f"{rule} in a loop"]

    def ratio(name: str) -> float:
        return round(median(ratios(loop, seconds[name])), 3)

    return {
        "rule": rule,
        "seconds": round(median(loop), 5),
        "of Distributed's": ratio(rule),
        "of DDP's": ratio("DDP"),
        "start": round(start_seconds[f"{rule} in a loop"], 2),
    }


def _ddp(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Run:
    wrapped = DistributedDataParallel(model)
    return partial(_train, wrapped, momentum_sgd(wrapped.parameters()), x, y)


def _loop(model: nn.Module, rule: str, x: torch.Tensor, y: torch.Tensor) -> Run:
    wrapped = CyclicDataParallel(model, optimizer=momentum_sgd, rule=rule)
    return partial(_train, wrapped, wrapped.optimizer, x, y)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    n: int,
) -> Iterator[None]:
    for _ in range(n):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        yield
    # After the last yield, and so not timed: complete the updates that are under way.
    if isinstance(model, CyclicDataParallel):
        model.synchronize()


def _runtime(
    model: nn.Module,
    rule: str,
    world: World,
    inputs: torch.Tensor,
    targets: torch.Tensor,
) -> Run:
    schedule = ScheduleSpec.from_call(rule, {"n": world.size}).build()
    stages = partition(model, world.size, inputs.chunk(world.size)[0])
    runtime = Distributed(stages, schedule, momentum_sgd, F.cross_entropy, world=world)
    return lambda n: runtime.run([(inputs, targets)] * n)

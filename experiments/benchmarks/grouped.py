"""Order "grouped" against plain PyTorch: one step of CDP-v2, and whole training loops.

All compute with the same precision, memory format and compilation.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.timing import alternate, ratios
from toolkit.cli.validate import check_counts
from toolkit.model import build, partition
from toolkit.runtime import SingleProcess, StepOptions
from toolkit.runtime.meters.meter import count_operations
from toolkit.runtime.step_options import allow_tf32
from toolkit.schedule import Schedule, catalog
from toolkit.training.data import Batches, synthetic

_WARM_UP = 3  # weights of two versions are first read in the second step


def run(config: DictConfig, device: torch.device, seed: int) -> list[dict[str, Any]]:
    """A row a method: median seconds, images/s, and its ratio to plain PyTorch round by round.

    A step's images are on the device already; those of a loop of ``steps`` steps are read,
    augmented and moved there, and the loop's losses are collected. On a GPU, which works while the
    next step is begun, ``steps`` steps are timed at once.

    *operations*: what torch is told to do in a step, where it is not compiled. Where they are
    small, a GPU's time goes by them.
    """
    check_counts(
        config, "image_size", "microbatches", "stages", "batch", "rounds", "steps", of="bench."
    )
    torch.manual_seed(seed)
    n_images = config.microbatches * config.batch
    model = build(config.model, 10, config.image_size).to(device)
    inputs = torch.randn(n_images, 3, config.image_size, config.image_size, device=device)
    targets = torch.randint(10, (n_images,), device=device)

    options = StepOptions(
        precision=config.precision, channels_last=config.channels_last, compile=config.compile
    )
    allow_tf32(options.precision == "tf32")
    plain = _Plain(copy.deepcopy(model), options, device)

    def runtime(schedule: Schedule) -> SingleProcess:
        stages = partition(copy.deepcopy(model), config.stages, inputs[: config.batch])
        return SingleProcess(stages, schedule, _sgd, F.cross_entropy, "grouped", options=options)

    cyclic = runtime(catalog.cyclic(config.microbatches, n_stages=config.stages))
    parallel = runtime(catalog.data_parallel(config.microbatches, n_stages=config.stages))
    images = synthetic(n_images * config.steps, 1, 10, config.image_size)
    epochs = count()

    def loop(train: Callable[[Batches], Iterator[Tensor]]) -> None:
        batches = images.train(n_images, seed, next(epochs), device)
        torch.stack(list(train(batches))).cpu()

    n_timed = config.steps if device.type == "cuda" else 1

    def timed(step: Callable[[Tensor, Tensor], object]) -> None:
        for _ in range(n_timed):
            step(inputs, targets)

    def train(grouped: SingleProcess, batches: Batches) -> Iterator[Tensor]:
        return (result.loss for result in grouped.run(batches))

    steps = {
        "plain PyTorch, step": lambda: timed(plain.step),
        f"{cyclic.schedule.name} grouped, step": lambda: timed(cyclic.step),
    }
    loops = {"plain PyTorch, loop": lambda: loop(lambda b: (plain.step(*batch) for batch in b))}
    for grouped in (parallel, cyclic):
        loops[f"{grouped.schedule.name} grouped, loop"] = partial(loop, partial(train, grouped))
    rows = [
        *_rows(alternate(steps, config.rounds, device, _WARM_UP), n_images, n_timed),
        *_rows(alternate(loops, config.rounds, device), n_images, config.steps),
    ]
    if config.compile == "none":
        for row, step in zip(rows, (plain.step, cyclic.step), strict=False):
            row["operations"] = count_operations(partial(step, inputs, targets)).total()
    return rows


class _Plain:
    """A model under plain PyTorch, as one would write it."""

    def __init__(self, model: nn.Module, options: StepOptions, device: torch.device) -> None:
        model = model.train()
        if options.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.optimizer = _sgd(model.parameters())
        self.model = (
            model if options.compile == "none" else torch.compile(model, mode=options.compile)
        )
        self.options, self.device = options, device

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss of a training step."""
        if self.options.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self.options.begin_step()
        self.optimizer.zero_grad()
        with self.options.autocast(self.device):
            loss = F.cross_entropy(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def _rows(seconds: dict[str, list[float]], n_images: int, n_steps: int) -> list[dict[str, Any]]:
    """Of methods that have run ``n_steps`` steps at a time."""
    first = next(iter(seconds))
    rows = []
    for name, taken in seconds.items():
        low, middle, high = ratios(taken, seconds[first])
        rows.append(
            {
                "method": name,
                "seconds": round(median(taken) / n_steps, 5),
                "images/s": round(n_steps * n_images / median(taken), 1),
                "ratio": round(middle, 3),
                "ratio_min": round(low, 3),
                "ratio_max": round(high, 3),
                "operations": None,
            }
        )
    return rows


def _sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=5e-4)
